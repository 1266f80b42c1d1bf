"""A state of 10⁵ small tensors: to save it, to open what says what is in it, and to restore it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from benchmarks.apart import summary
from benchmarks.peers import OURS, Contender, flat, states
from benchmarks.states import Trained, size_bytes
from benchmarks.together import check_same, durable_save_s, opened
from ckpt_tasks import open_run
from ckpt_tasks.run.opening import open_checkpoint

__all__ = ["measure"]

_WIDTH = 64


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Time saves, opens and restores of every contender in shuffled order, `rounds` times or three, which is less.

    The state is a model of 25,000 parameters of 64 numbers with AdamW: 10⁵ tensors. An optimizer step precedes every
    save; a save ends with an fsync, ours ("+ fsync") where the tool has none; files are read from the page cache. To
    open is to learn name, shape, dtype and place of every tensor and to read none; torch.load knows no way to do that
    but to build them all over mapped memory. A restore goes into another model's own tensors, and is checked, to the
    bit, outside of the time.
    """
    rounds = min(rounds, 3)  # a round takes minutes, nearly all of them DCP's and torch.load's
    trained, into = _build(tiny=tiny, seed=0, device=device), _build(tiny=tiny, seed=1, device=device)
    found: dict[str, dict[str, list[float]]] = {"save": {}, "open": {}, "restore": {}}
    with opened(directory, device) as contenders:
        for _ in range(rounds):
            for name in random.sample(sorted(contenders), len(contenders)):
                trained.step()
                label = name if contenders[name].synced else f"{name} + fsync"
                for row, seconds in _once(name, contenders[name], trained, into).items():
                    found[row].setdefault(label if row == "save" else name, []).append(seconds)
    tensors = len(flat(states(trained.state)))
    titles = {"save": "save, durable", "open": "open", "restore": "restore, page cache warm"}
    rows = {
        f"{tensors:,} tensors: {titles[row]}": {name: summary(times) for name, times in by_name.items()}
        for row, by_name in found.items()
    }
    return {"size_bytes": size_bytes(trained), "rounds": rounds, "device": device, "tensors": tensors, "rows": rows}


def _build(*, tiny: bool, seed: int, device: str) -> Trained:
    torch.manual_seed(seed)
    count = 8 if tiny else 25_000
    model = nn.ParameterList(nn.Parameter(torch.randn(_WIDTH, device=device)) for _ in range(count))
    trained = Trained(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    trained.step()
    return trained


def _once(name: str, contender: Contender, trained: Trained, into: Trained) -> dict[str, float]:
    path = contender.directory / "saved"
    seconds = {
        "save": durable_save_s(contender, trained, path),
        "open": _seconds(lambda: _OPEN[name](contender.directory)),
        "restore": _seconds(lambda: contender.load(path, into.state)),
    }
    check_same(name, trained, into)
    return seconds


def _open_ours(directory: Path) -> object:
    run = open_run(str(directory / "ckpt-tasks"))
    return open_checkpoint(run.history.store, run.find("latest")).rows


def _open_safetensors(directory: Path) -> object:
    with safe_open(directory / "saved", framework="pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (it is not a mapping)
        return {key: (found.get_shape(), found.get_dtype()) for key, found in slices.items()}


_OPEN: dict[str, Callable[[Path], object]] = {
    OURS: _open_ours,
    "DCP save": lambda directory: FileSystemReader(directory / "saved").read_metadata().state_dict_metadata,
    "safetensors save_file": _open_safetensors,
    "torch.save": lambda directory: torch.load(directory / "saved", weights_only=True, mmap=True),
}


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    kept = run()
    seconds = time.perf_counter() - started
    del kept  # taken down after the clock has stopped
    return seconds
