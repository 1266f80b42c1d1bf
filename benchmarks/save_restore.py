"""Durable saves, verified restores and restarts beside torch.save, safetensors and DCP, and beside the limits."""

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
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_saver as dcp_state_dict_saver

from benchmarks import reborn
from benchmarks.states import Trained, build, flat, size_bytes, states
from ckpt_tasks import CheckpointConfig, Checkpointer

__all__ = ["measure"]


_Contenders = dict[str, Callable[[], object]]
_IN_A_ROW = 6


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Time every contender `rounds` times in shuffled order; return seconds by row and contender, and the state's size.

    Saves are timed in this process, from the third on. Of those in a row each changes the whole state before it, which
    is not timed, and removes the oldest one; ours reads some back behind them.

    Every restore is the first of a new process, as after a crash:
    its memory has not been touched. Cold: every file is dropped from the page cache before; warm: it is read once.
    """
    trained = build(tiny=tiny, device=device)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    found: dict[str, dict[str, list[float]]] = {}
    config = CheckpointConfig(checkpoint_dir=str(directory / "saves"), run_key="bench", max_num_checkpoints=None)
    with Checkpointer(config) as ours:
        saves = _saves(directory, trained, ours, device)
        for save in (*saves.values(), *saves.values()):
            _change(trained)
            save()  # the first ones allocate and plan; what is compared is the steady state
        for _ in range(rounds):
            for name in random.sample(sorted(saves), len(saves)):
                _change(trained)  # or ours would have nothing to write
                os.sync()
                found.setdefault("save, durable", {}).setdefault(name, []).append(_seconds(saves[name], device))
    found["durable saves in a row, the newest two kept: each"] = _in_a_row(directory, trained, rounds, device)
    shutil.rmtree(directory)
    directory.mkdir()
    with _quiet():
        reborn.save(directory, trained)
        reborn.start(reborn.MEMORY, directory, tiny=tiny, device=device)  # the first one has nothing in memory yet
    for _ in range(rounds):
        for cache, prepare in (("warm", _warm), ("cold", _drop)):
            for name in random.sample(sorted(reborn.CONTENDERS), len(reborn.CONTENDERS)):
                os.sync()
                prepare(directory)
                born = time.time()
                report = reborn.start(name, directory, tiny=tiny, device=device)
                restores = found.setdefault(f"restore in a new process, page cache {cache}", {})
                if name != reborn.BARE:
                    restores.setdefault(name, []).append(report["restore_s"])
                if name == reborn.LIMIT:
                    continue  # what it leaves is not a training
                starts = found.setdefault(f"kill -9, then start to first new step, page cache {cache}", {})
                starts.setdefault(name, []).append(report["stepped_at"] - born)
    with reborn.opened(directory, memory=True) as ckpt:
        ckpt.acquire()
        ckpt.prune()  # what the last one that was killed left in memory
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
            torch.save(states(trained), file)
            file.flush()
            os.fsync(file.fileno())

    def safetensors_save() -> None:
        save_file(flat(trained), directory / "all.safetensors")
        _fsync(directory / "all.safetensors")

    def dcp_save() -> None:
        with _quiet():
            dcp_state_dict_saver.save(states(trained), checkpoint_id=directory / "dcp", no_dist=True)

    return {
        "ckpt-tasks": lambda: ours.save(next(steps), trained.state),
        "torch.save + fsync": torch_save,
        "safetensors save_file + fsync": safetensors_save,
        "DCP save": dcp_save,
        "limit: copy to memory": lambda: into.copy_(source),
        "limit: O_DIRECT write": lambda: _direct_write(directory / "direct", memory),
    }


def _in_a_row(directory: Path, trained: Trained, rounds: int, device: str) -> dict[str, list[float]]:
    """Return the mean seconds of a save, for each round of some in a row."""
    steps, files = itertools.count(1), itertools.count(1)
    config = CheckpointConfig(checkpoint_dir=str(directory / "two"), run_key="bench", max_num_checkpoints=2)

    def torch_save() -> None:
        number = next(files)
        with open(directory / f"torch-{number}.pt", "wb") as file:
            torch.save(states(trained), file)
            file.flush()
            os.fsync(file.fileno())
        (directory / f"torch-{number - 2}.pt").unlink(missing_ok=True)

    found: dict[str, list[float]] = {}
    with Checkpointer(config) as ours:
        saves: _Contenders = {
            "ckpt-tasks": lambda: ours.save(next(steps), trained.state),
            "torch.save + fsync": torch_save,
        }
        saves["ckpt-tasks"]()  # prune() needs a run, and chance may put another contender first
        for number in range(rounds + 1):
            for name in random.sample(sorted(saves), len(saves)):
                os.sync()
                seconds = []
                for _ in range(_IN_A_ROW):
                    _change(trained)
                    seconds.append(_seconds(saves[name], device))
                ours.prune()  # what went on behind the saves does not disturb the next contender
                if number:  # the first ones allocate and plan
                    found.setdefault(name, []).append(sum(seconds) / len(seconds))
    return found


@torch.no_grad()
def _change(trained: Trained) -> None:
    torch._foreach_add_(list(flat(trained).values()), 0.5)


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
