"""A plain loop over torchdata's StatefulDataLoader, as a job whose legs are killed: it records which samples came."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader
from tests.support.legs import Leg

SAMPLES = 46  # 12 batches of 4, the last one of 2


def loaders(options: Any) -> tuple[StatefulDataLoader | ResumableLoader, Any]:
    """Return a loader, and its stream if it has one: what a user has before he knows of us."""
    workers = options.get("workers", 0)
    if options["over"] == "ours":
        data: Any = [*range(SAMPLES)]
        return ResumableLoader(data, batch_size=4, shuffle=True, num_workers=workers), None
    if options["over"] == "dataset":
        return StatefulDataLoader(range(SAMPLES), batch_size=4, shuffle=True, num_workers=workers), None
    rows = Dataset.from_dict({"n": [*range(SAMPLES)]})
    rows = rows if options["over"] == "stream" else rows.shuffle(seed=1)
    stream = rows.to_iterable_dataset(num_shards=4)
    if options["over"] == "shards":
        stream = stream.shuffle(seed=1, buffer_size=1)  # of shards and samples in them: nothing waits in a buffer
    return StatefulDataLoader(stream, batch_size=4, num_workers=workers), stream


def train(leg: Leg) -> None:
    """Iterate three epochs, and sum the samples into a weight."""
    warnings.filterwarnings("ignore")
    random.seed(7)
    torch.manual_seed(7)
    loader, stream = loaders(leg.options)
    at = {"epoch": 0}
    weight = torch.zeros(())
    state = {"data": loader, "at": at, "weight": weight}
    config = CheckpointConfig(checkpoint_dir=leg.folder / "run", step_interval=1, memory_dir=leg.folder / "memory")
    with Checkpointer(config) as ckpt:
        leg.settle = ckpt.wait
        step = ckpt.restore(state)
        leg.record("begin", step, "")
        while at["epoch"] < 3:
            if stream is not None:
                stream.set_epoch(at["epoch"])
            for batch in loader:
                ids = (batch["n"] if isinstance(batch, dict) else batch).tolist()
                leg.within(step)
                step += 1
                weight += sum(ids) * torch.rand(())
                leg.record("samples", step, str(ids))
                ckpt.step(step, state, epoch=at["epoch"])
            at["epoch"] += 1
    leg.end(step, [weight])
