"""DCP with our writer and reader beside DCP's own: durable saves, loads, and what async_save makes training wait for.

Both save and load one state in one run, in shuffled order, in gloo ranks of this host, and every time is that of the
slowest rank. DCP's files are not verified by anybody; ours are, twice in each load.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks.apart import summary
from benchmarks.ranks import _clear, _gang, _settle, _timed, _Trained
from benchmarks.stall import fsync_all
from ckpt_tasks import CheckpointConfig
from ckpt_tasks.dcp import CkptReader, CkptWriter

__all__ = ["measure"]

_OURS = "CkptWriter, CkptReader"
_THEIRS = "FileSystemWriter, FileSystemReader"
_TITLES = {
    "save": "dcp.save, until it is on disk",
    "waits": "dcp.async_save, training waits",
    "later": "dcp.async_save, until it is on disk",
    "load": "dcp.load",
}

_Way = tuple[Callable[[int], Any], Callable[[], Any], Path | None]  # the last one has to be on disk in the end
_Seconds = dict[str, dict[str, list[float]]]  # what was timed → contender → seconds


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Time both with 1 and 2 ranks, FSDP2 with AdamW; `ratios` are ours over theirs, the median over the rounds."""
    shutil.rmtree(directory, ignore_errors=True)
    rows: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    size_bytes = 0
    for size in (1, 2):
        measured = _gang(size, _both, str(directory / str(size)), tiny, rounds)
        size_bytes = measured["size_bytes"]
        for timed, by_name in measured["seconds"].items():
            title = f"{size} {'rank' if size == 1 else 'ranks'}: {_TITLES[timed]}"
            rows[title] = {name: summary(times) for name, times in by_name.items()}
            ratios[title] = median(ours / theirs for ours, theirs in zip(by_name[_OURS], by_name[_THEIRS], strict=True))
    shutil.rmtree(directory)
    return {"size_bytes": size_bytes, "rounds": rounds, "device": "cpu", "rows": rows, "ratios": ratios}


def _both(root: str, tiny: bool, rounds: int) -> dict[str, Any]:
    trained = _Trained("FSDP2" if dist.get_world_size() > 1 else "plain", tiny=tiny)
    ways = {_OURS: _ours(root), _THEIRS: _theirs(root)}
    seconds: _Seconds = {}
    for number in range(1, rounds + 3):
        for name in random.Random(number).sample(sorted(ways), len(ways)):
            times = _times(trained, number, name, ways[name])
            if number > 2:  # the first ones touch new memory
                for timed, value in times.items():
                    seconds.setdefault(timed, {}).setdefault(name, []).append(value)
    return {"seconds": seconds, "size_bytes": trained.size_bytes}


def _times(trained: _Trained, number: int, name: str, way: _Way) -> dict[str, float]:
    """Save, load and save in the background; check what was loaded."""
    times, (writer, reader, place) = {}, way

    def synced() -> None:
        if place is not None:
            fsync_all(place)

    if place is not None:
        _clear(place)
    trained.set(2 * number)
    _settle()
    [*_, times["save"]] = _timed(lambda: save(trained.tree, storage_writer=writer(2 * number)), synced)
    trained.set(-1)
    _settle()
    [times["load"], _] = _timed(lambda: load(trained.tree, storage_reader=reader()), lambda: None)
    trained.check(2 * number, name)
    if place is not None:
        _clear(place)
    _settle()
    pending: list[Any] = []

    def begin() -> None:
        pending.append(async_save(trained.tree, storage_writer=writer(2 * number + 1)))

    def end() -> None:
        pending[0].result()
        synced()

    times["waits"], times["later"] = _timed(begin, end)
    return times


def _ours(root: str) -> _Way:
    config = CheckpointConfig(checkpoint_dir=f"{root}/run")
    return lambda number: CkptWriter(config, step=number), lambda: CkptReader(config), None


def _theirs(root: str) -> _Way:
    place = Path(root) / "dcp"
    return lambda number: FileSystemWriter(place), lambda: FileSystemReader(place), place
