"""Durable saves and verified restores beside torch.save, safetensors and DCP, and beside the limits of this machine."""

from __future__ import annotations

import gc
import io
import itertools
import mmap
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import state_dict_loader as dcp_state_dict_loader
from torch.distributed.checkpoint import state_dict_saver as dcp_state_dict_saver

from benchmarks.states import Trained, build, size_bytes
from ckpt_tasks import CheckpointConfig, Checkpointer

__all__ = ["measure"]


_Contenders = dict[str, Callable[[], object]]


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Time every contender `rounds` times in shuffled order; return seconds by row and contender, and the state's size.

    Cold: every file is dropped from the page cache before each restore. Warm: it is read once before.
    """
    trained, target = build(tiny=tiny, device=device), build(tiny=tiny, seed=1, device=device)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    config = CheckpointConfig(checkpoint_dir=str(directory / "ours"), run_key="bench", max_num_checkpoints=2)
    with Checkpointer(config) as ours:
        saves = _saves(directory, trained, ours, device)
        restores = _restores(directory, trained, target, ours)
        rows: list[tuple[str, _Contenders, Callable[[Path], None] | None]] = [
            ("save, durable", saves, None),
            ("restore, page cache warm", restores, _warm),
            ("restore, page cache cold", restores, _drop),
        ]
        for save in (*saves.values(), *saves.values()):
            save()  # the first ones allocate and plan; what is compared is the steady state
        found: dict[str, dict[str, list[float]]] = {row: {} for row, _, _ in rows}
        for _ in range(rounds):
            for row, contenders, prepare in rows:
                for name in random.sample(sorted(contenders), len(contenders)):
                    os.sync()
                    if prepare:
                        prepare(directory)
                    found[row].setdefault(name, []).append(_seconds(contenders[name], device))
        ours.restore(target.state)
        _check_equal(trained, target)
    shutil.rmtree(directory)
    cells = {row: {name: _summary(times) for name, times in by_name.items()} for row, by_name in found.items()}
    return {"size_bytes": size_bytes(trained), "rounds": rounds, "device": device, "rows": cells}


def _saves(directory: Path, trained: Trained, ours: Checkpointer, device: str) -> _Contenders:
    steps = itertools.count(1)
    source = torch.zeros(size_bytes(trained), dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, source.nbytes)
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
            dcp_state_dict_saver.save(_states(trained), checkpoint_id=directory / "dcp", no_dist=True)

    return {
        "ckpt-tasks": lambda: ours.save(next(steps), trained.state),
        "torch.save + fsync": torch_save,
        "safetensors save_file + fsync": safetensors_save,
        "DCP save": dcp_save,
        "limit: copy to memory": lambda: into.copy_(source),
        "limit: O_DIRECT write": lambda: _direct_write(directory / "direct", memory),
    }


def _restores(directory: Path, trained: Trained, target: Trained, ours: Checkpointer) -> _Contenders:
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
            dcp_state_dict_loader.load(_states(target), checkpoint_id=directory / "dcp", no_dist=True)

    return {
        "ckpt-tasks (verified, into the objects)": lambda: ours.restore(target.state),
        "torch.load": lambda: torch.load(directory / "torch.pt", weights_only=True),
        "torch.load + load_state_dict": torch_load_into,
        "safetensors load_file + copy (unverified)": safetensors_load_into,
        "DCP load (unverified, into tensors)": dcp_load,
    }


def _seconds(run: Callable[[], object], device: str) -> float:
    started = time.perf_counter()
    result = run()
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    del result
    gc.collect()
    return seconds


def _files(directory: Path) -> list[Path]:
    # Not the sign of life, which comes and goes under temporary names.
    return [path for path in directory.rglob("*") if path.is_file() and path.parent.name != "heartbeat"]


def _warm(directory: Path) -> None:
    for path in _files(directory):
        with path.open("rb", buffering=0) as file:
            while file.read(16 << 20):
                pass


def _drop(directory: Path) -> None:
    for path in _files(directory):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


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


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DCP's warning, at every call, that nothing is distributed here, from the timings' output."""
    with redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _summary(times: list[float]) -> dict[str, float]:
    return {"min_s": min(times), "median_s": median(times), "max_s": max(times)}
