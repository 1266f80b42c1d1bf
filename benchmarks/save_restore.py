"""Durable saves and verified restores beside torch.save, safetensors and DCP, and beside the limits of this machine."""

from __future__ import annotations

import io
import mmap
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from benchmarks.states import Trained, build, size_bytes
from ckpt_tasks import CheckpointConfig, Checkpointer

__all__ = ["measure"]


def measure(directory: Path, *, tiny: bool, rounds: int) -> dict[str, Any]:
    """Time every contender `rounds` times in shuffled order; return seconds by row and contender, and the state's size."""
    trained, target = build(tiny=tiny), build(tiny=tiny, seed=1)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    saves, restores = _contenders(directory, trained, target, size_bytes(trained))
    for save in saves.values():
        save()  # first saves allocate and plan; what is compared is the steady state
    found: dict[str, dict[str, list[float]]] = {"save, durable": {}, "restore, page cache warm": {}}
    for _ in range(rounds):
        for row, contenders in (("save, durable", saves), ("restore, page cache warm", restores)):
            for name in random.sample(sorted(contenders), len(contenders)):
                os.sync()
                started = time.perf_counter()
                contenders[name]()
                found[row].setdefault(name, []).append(time.perf_counter() - started)
    _check_equal(trained, target)
    shutil.rmtree(directory)
    rows = {row: {name: _summary(times) for name, times in cells.items()} for row, cells in found.items()}
    return {"size_bytes": size_bytes(trained), "rounds": rounds, "rows": rows}


def _contenders(
    directory: Path, trained: Trained, target: Trained, total_bytes: int
) -> tuple[dict[str, Callable[[], None]], dict[str, Callable[[], None]]]:
    config = CheckpointConfig(checkpoint_dir=str(directory / "ours"), run_key="bench", max_num_checkpoints=2)
    ours = Checkpointer(config)
    steps = iter(range(1, 10_000))
    memory = mmap.mmap(-1, total_bytes)
    source = torch.zeros(total_bytes, dtype=torch.uint8)
    into = torch.frombuffer(memory, dtype=torch.uint8)

    def torch_save() -> None:
        with open(directory / "torch.pt", "wb") as file:
            torch.save(_states(trained), file)
            file.flush()
            os.fsync(file.fileno())

    def safetensors_save() -> None:
        save_file(_flat(trained), directory / "all.safetensors")
        _fsync(directory / "all.safetensors")

    def dcp_save() -> None:
        with _quiet():
            dcp.save(_states(trained), checkpoint_id=directory / "dcp", no_dist=True)

    def ckpt_restore() -> None:
        ours.restore(target.state)

    def torch_load() -> None:
        torch.load(directory / "torch.pt", weights_only=True)

    def torch_load_into() -> None:
        loaded = torch.load(directory / "torch.pt", weights_only=True)
        target.model.load_state_dict(loaded["model"])
        target.optimizer.load_state_dict(loaded["optimizer"])

    def safetensors_load_into() -> None:
        loaded = load_file(directory / "all.safetensors")
        with torch.no_grad():
            for name, tensor in _flat(target).items():
                tensor.copy_(loaded[name])

    def dcp_load() -> None:
        with _quiet():
            dcp.load(_states(target), checkpoint_id=directory / "dcp", no_dist=True)

    saves = {
        "ckpt-tasks": lambda: _done(ours.save(next(steps), trained.state)),
        "torch.save + fsync": torch_save,
        "safetensors save_file + fsync": safetensors_save,
        "DCP save": dcp_save,
        "limit: memcpy": lambda: _done(into.copy_(source)),
        "limit: O_DIRECT write": lambda: _direct_write(directory / "direct", memory),
    }
    restores = {
        "ckpt-tasks (verified, into the objects)": ckpt_restore,
        "torch.load": torch_load,
        "torch.load + load_state_dict": torch_load_into,
        "safetensors load_file + copy (unverified)": safetensors_load_into,
        "DCP load (unverified, into tensors)": dcp_load,
        "limit: memcpy": lambda: _done(into.copy_(source)),
    }
    return saves, restores


def _states(trained: Trained) -> dict[str, Any]:
    return {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}


def _flat(trained: Trained) -> dict[str, torch.Tensor]:
    flat = {f"model.{name}": tensor for name, tensor in trained.model.state_dict().items()}
    for index, values in trained.optimizer.state_dict()["state"].items():
        flat |= {f"optimizer.{index}.{name}": tensor for name, tensor in values.items()}
    return flat


def _check_equal(trained: Trained, target: Trained) -> None:
    saved, restored = _flat(trained), _flat(target)
    if any(not torch.equal(tensor, restored[name]) for name, tensor in saved.items()):
        raise AssertionError("a restored tensor differs: these times are worth nothing")


def _direct_write(path: Path, memory: mmap.mmap) -> None:
    path.unlink(missing_ok=True)
    flags = os.O_CREAT | os.O_WRONLY | getattr(os, "O_DIRECT", 0)
    whole = len(memory) - len(memory) % 4096
    view, fd = memoryview(memory), os.open(path, flags, 0o600)
    for begin in range(0, whole, 16 << 20):
        os.pwrite(fd, view[begin : min(whole, begin + (16 << 20))], begin)
    os.fsync(fd)
    os.close(fd)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


class _quiet(redirect_stderr):  # noqa: N801  a context manager, named as one
    """DCP warns at every call that nothing is distributed here."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        warnings.simplefilter("ignore")


def _done(result: object) -> None:
    del result


def _summary(times: list[float]) -> dict[str, float]:
    return {"min_s": min(times), "median_s": median(times), "max_s": max(times)}
