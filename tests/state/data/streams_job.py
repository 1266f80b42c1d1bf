"""A loop over a stream, on one or more ranks, as a job whose legs are killed: it records which samples came."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets.distributed import split_dataset_by_node
from torch import distributed
from torch.utils.data import IterableDataset

from ckpt_tasks import ByRank, CheckpointConfig, Checkpointer, ResumableLoader, ShuffleBuffer, sample_generator
from tests.support.legs import Leg
from tests.support.streams import OPERATIONS, rows

ROWS, SHARDS, EPOCHS = 48, 4, 3


def _augmented(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "noise": sample_generator(row["a"], numpy=True).normal()}  # type: ignore[union-attr]


def _webdataset() -> Any:
    return import_module("webdataset")


class Tars(IterableDataset[Any]):
    """Shards of tar files in another order each epoch, as docs/DATA.md makes them."""

    def __init__(self, folder: Path):
        self.urls = [str(folder / f"{shard}.tar") for shard in range(SHARDS)]
        self.epoch = 0
        for shard, url in enumerate(self.urls):
            with _webdataset().TarWriter(url) as tar:
                for number in range(shard * ROWS // SHARDS, (shard + 1) * ROWS // SHARDS):
                    tar.write({"__key__": f"{number:04}", "a.cls": number})

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        split = _webdataset().split_by_node if distributed.is_initialized() else None
        tars = _webdataset().WebDataset(self.urls, shardshuffle=SHARDS, seed=self.epoch, nodesplitter=split)
        return ({"a": sample["a.cls"]} for sample in tars.decode())


KINDS: dict[str, Callable[[], Any]] = {
    # The shards have equally many: datasets gives the ranks others in each epoch, and all have to step together.
    "map and filter": lambda: rows(ROWS).map(lambda row: {"b": 2 * row["a"]}).filter(lambda row: row["b"] % 3),
    "interleave": OPERATIONS["interleave by chance"],
    "shuffle": OPERATIONS["shuffle of a map's shards"],
    "augmented": lambda: rows(ROWS).map(_augmented),
}


def loader_of(kind: str, folder: Path, rank: int, ranks: int, workers: int) -> ResumableLoader:
    """Return the loader of a rank: of its part of a stream, or of samples by number."""
    if kind == "by number":
        data: Any = [{"a": number} for number in range(ROWS + 2)]
        return ResumableLoader(data, 6 // ranks, shuffle=True, drop_last=True, num_workers=workers)
    if kind == "webdataset":
        folder.mkdir(exist_ok=True)
        return ResumableLoader(ShuffleBuffer(Tars(folder), 7, seed=1), 4, num_workers=workers, replay=True)
    stream = KINDS[kind.removesuffix(", buffer")]()
    if ranks > 1:
        stream = split_dataset_by_node(stream, rank=rank, world_size=ranks)
    if kind.endswith(", buffer"):
        stream = ShuffleBuffer(stream, 7, seed=1)
    return ResumableLoader(stream, 4, num_workers=workers)


def train(leg: Leg) -> None:
    """Iterate three epochs, and sum what comes into a weight; the last leg may have another number of ranks."""
    datasets.disable_progress_bars()
    ranks = leg.options.get("ranks", 1)
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
    if count == 1:
        return 0, []
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
    loader = loader_of(kind, leg.folder / f"tars-{rank}", rank, ranks, leg.options.get("workers", 0))
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
                weight += _from_first(torch.rand((), dtype=torch.float64), ranks) * sum(map(sum, ids))
                noise = _together([float(one) for one in batch.get("noise", [])], ranks)
                weight += sum(chain(*noise))
                if not rank:
                    leg.record("samples", step, str(ids if kind != "by number" else sorted(chain(*ids))))
                ckpt.step(step, state, epoch=epoch)
    if not rank:
        leg.record("weight", step, float(weight))


def _together(values: list[Any], ranks: int) -> list[list[Any]]:
    every: list[Any] = [values] * ranks
    if ranks > 1:
        distributed.all_gather_object(every, values)
    return every


def _from_first(number: torch.Tensor, ranks: int) -> torch.Tensor:
    if ranks > 1:
        distributed.broadcast(number, 0)
    return number
