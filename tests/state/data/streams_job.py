"""A loop over a stream, on one or more ranks, as a job whose legs are killed: it records which samples came."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets.distributed import split_dataset_by_node
from torch import distributed

from ckpt_tasks import ByRank, CheckpointConfig, Checkpointer, ResumableLoader, ShuffleBuffer
from tests.support.legs import Leg
from tests.support.streams import OPERATIONS

ROWS, EPOCHS = 48, 3


def loader_of(kind: str, rank: int, ranks: int) -> ResumableLoader:
    """Return the loader of a rank: of its part of a stream, or of samples by number."""
    if kind == "by number":
        data: Any = [{"a": number} for number in range(ROWS + 2)]
        return ResumableLoader(data, 6 // ranks, shuffle=True, drop_last=True)
    stream = split_dataset_by_node(OPERATIONS["shuffle of a map's shards"](), rank=rank, world_size=ranks)
    if kind.endswith(", buffer"):
        stream = ShuffleBuffer(stream, 7, seed=1)
    return ResumableLoader(stream, 4)


def train(leg: Leg) -> None:
    """Iterate three epochs, and sum what comes into a weight; the last leg may have another number of ranks."""
    datasets.disable_progress_bars()
    ranks = leg.options["ranks"]
    if leg.is_last and leg.folder.name == "killed":
        ranks = leg.options.get("ranks at last", ranks)
    rank, others = _ranks(ranks)
    try:
        _train(leg, rank, ranks)
    finally:
        if rank:
            os._exit(0)
        for pid in others:
            os.waitpid(pid, 0)


def _ranks(count: int) -> tuple[int, list[int]]:
    """Become as many ranks, which end with the first one; return this one's number, and the others' processes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = Path(tempfile.mkdtemp(), "ranks")
    rank, others = 0, list[int]()
    for number in range(1, count):
        if (pid := os.fork()) == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
            rank, others = number, []
            break
        others.append(pid)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    return rank, others


def _train(leg: Leg, rank: int, ranks: int) -> None:
    if rank:
        leg.spare()
    torch.manual_seed(7)
    kind = leg.options["over"]
    loader = loader_of(kind, rank, ranks)
    weight = torch.zeros((), dtype=torch.float64)
    state = {"data": loader if kind == "by number" else ByRank(loader), "weight": weight}
    config = CheckpointConfig(checkpoint_dir=leg.folder / "run", step_interval=1, memory_dir=leg.folder / "memory")
    with Checkpointer(config) as ckpt:
        leg.settle = ckpt.wait
        step = ckpt.restore(state)
        if not rank:
            leg.record("begin", step, "")
        for epoch in loader.epochs(EPOCHS):
            for batch in loader:
                leg.within(step)
                step += 1
                ids = _together([int(one) for one in batch["a"]], ranks)
                distributed.broadcast(number := torch.rand((), dtype=torch.float64), 0)
                weight += number * sum(map(sum, ids))
                if not rank:
                    leg.record("samples", step, str(ids if kind != "by number" else sorted(chain(*ids))))
                ckpt.step(step, state, epoch=epoch)
    if not rank:
        leg.record("weight", step, float(weight))


def _together(values: list[Any], ranks: int) -> list[list[Any]]:
    every: list[Any] = [values] * ranks
    distributed.all_gather_object(every, values)
    return every
