"""Write the golden run of many ranks: `python -m tools.golden_ranks`, from the root of a checkout.

Three gloo ranks save steps 1 to 3, and keep two. What `tools/golden.py` says of golden runs is true of this one as
well: what was checked in is never written again after the first release.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableSampler
from ckpt_tasks.checkpoint.save import parts
from ckpt_tasks.format.keys import heartbeat_name
from ckpt_tasks.format.parsing import FORMAT_VERSION
from ckpt_tasks.state.tensors import placements
from tests.support.gang import run
from tools.golden import HERE, fixed

RANKS = 3
STEPS = 3
RUN_KEY = "golden-ranks"


def state_at(k: int, rank: int) -> dict[str, Any]:
    """Return a rank's state at step k; the test says once more, in its own words, what the whole is."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model = nn.Sequential(nn.Linear(4, 7, bias=False), nn.Linear(7, 5))
    with torch.no_grad():
        for n, (name, value) in enumerate(model.state_dict().items()):
            frozen = name == "0.weight"
            value.copy_((torch.arange(value.numel()).reshape(value.shape) + n) * (1 if frozen else k))
    model[0].requires_grad_(False)
    for layer in (model[0], model[1], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.25)
    for n, parameter in enumerate(optimizer.param_groups[0]["params"]):
        optimizer.state[parameter] = {
            "step": torch.tensor(float(k)),
            "exp_avg": torch.full_like(parameter, n + k / 4),
            "exp_avg_sq": torch.full_like(parameter, n + k / 2),
        }
    replicated = nn.BatchNorm1d(24)  # in no mesh: every rank has all of it
    with torch.no_grad():
        replicated.get_buffer("running_mean").copy_(torch.arange(24) * k)
    sampler = ResumableSampler(100, 3, seed=3, rank=rank, world_size=RANKS)
    for _ in range(2 * k):
        sampler.advance()
    columns = torch.arange(20, dtype=torch.int32).reshape(4, 5) * k
    return {
        "model": model,
        "optimizer": optimizer,
        "replicated": replicated,
        "tensors": {
            "columns": distribute_tensor(columns, mesh, [Shard(1)]),
            "row": distribute_tensor(torch.tensor([[0.5, -1.0]]).mul(k).to(torch.bfloat16), mesh, [Shard(0)]),
            "empty": torch.empty(0, 3),
        },
        "noise": torch.Generator().manual_seed(100 * k + rank),
        "data": sampler,
        "values": {"step": k, "words": ["a", (1, None)]},
    }


def save(rank: int, size: int, directory: str) -> None:
    """Save every step in one rank."""
    # What is cut among replicas, and what is written again, begins at sizes that no golden run has.
    parts._REUSED_BYTES = 0
    placements._CUT_BYTES = 64
    config = CheckpointConfig(checkpoint_dir=directory, run_key=RUN_KEY, memory_dir=None, max_num_checkpoints=2)
    with fixed(), Checkpointer(config) as ckpt:
        for k in range(1, STEPS + 1):
            state = state_at(k, rank)
            random.seed(10 * k + rank)
            np.random.seed(10 * k + rank)  # noqa: NPY002 (NumPy's global generator is part of the state)
            torch.manual_seed(10 * k + rank)
            ckpt.save(k, state, metrics={"loss": 1 / k}, epoch=k)


def make(directory: Path) -> None:
    """Write the run, and leave out what is not part of what a run is: a sign of life, and the room of its owner."""
    run(RANKS, save, str(directory))
    (directory / heartbeat_name(1)).unlink()
    (directory / heartbeat_name(1)).parent.rmdir()
    shutil.rmtree(directory / ".ckpt-reserve")


if __name__ == "__main__":
    target = HERE / f"v{FORMAT_VERSION}" / "ranks"
    if target.exists():
        raise SystemExit(f"{target} exists: see this module's first lines")
    try:
        make(target)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
