"""What a save costs the training, the first one and later ones, and how long it takes until it is on disk."""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.apart import Report, answer, by_row, collect
from benchmarks.peers import CONTENDERS, PEERS, Contender, differing, flat, states
from benchmarks.states import Trained, build, size_bytes
from ckpt_tasks.checkpoint.memory.memory_room import default_directory

__all__ = ["change_all", "check", "copies", "fsync_all", "in_step", "measure", "remove"]

_COPY, _NEW, _WRITE = "limit: copy to memory", "limit: write to new files in memory", "limit: O_DIRECT write"
_LIMITS = (_COPY, _NEW, _WRITE)
_ROWS = {
    "first waits": "first save: training waits",
    "first durable": "first save: until it is on disk",
    "returns": "later saves: until the call returns",
    "waits": "later saves: training waits",
    "done": "later saves: until the tool says that it is done",
    "durable": "later saves: until it is on disk",
}


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Time saves of every contender, `rounds` times in shuffled order, each time in a new process.

    A tool is made before the model, as in a training script. The model takes an optimizer step before every save, so
    nothing is unchanged; and every tensor changes while the last save is being written: what is then read back must be,
    to the bit, what was there at the call. "Training waits": until the call has returned and the state may change, as
    the tool defines it: a copy in the background is waited for right after the call, at a lock or a future. "On disk":
    every file is fsynced, by us ("+ fsync") where the tool does not. `absent` says why a contender has no row.
    """
    reports, absent = collect(
        "benchmarks.stall", [*CONTENDERS, *_LIMITS], directory, tiny=tiny, rounds=rounds, device=device
    )
    return {
        "size_bytes": size_bytes(build(tiny=tiny, device="meta")),
        "rounds": rounds,
        "device": device,
        "rows": by_row(reports, _ROWS, _label),
        "absent": absent,
    }


def fsync_all(path: Path) -> None:
    """Bring a file to the disk, or every file and directory below a directory."""
    for place in [path, *path.rglob("*")] if path.is_dir() else [path]:
        fd = os.open(place, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check(contender: Contender, path: Path, expected: Mapping[str, torch.Tensor], *, tiny: bool) -> None:
    """Read back what was saved; raise RuntimeError where a tensor is not, to the bit, the expected one."""
    into = build(tiny=tiny, seed=1, device=contender.device)
    contender.load(path, into.state)
    if odd := differing(expected, flat(states(into.state))):
        raise RuntimeError(f"{len(odd)} of {len(expected)} tensors are not what was saved, {odd[0]} for one")


def change_all(trained: Trained) -> None:
    """Change every tensor of a state in place, the last one first: a copy that is still under way is then torn."""
    with torch.no_grad():
        for tensor in reversed(flat(states(trained.state)).values()):
            tensor.add_(1)


def in_step(trained: Trained, act: Callable[[], None]) -> None:
    """Act where a step of the optimizer begins to change the state, behind the hooks that a tool has put before it.

    The step itself changes nothing: there are no gradients.
    """
    hook = trained.optimizer.register_step_pre_hook(lambda *_: act())  # those of all optimizers come first
    trained.optimizer.step()
    hook.remove()


def copies(trained: Trained) -> dict[str, torch.Tensor]:
    """Copy every tensor of a state."""
    return {name: tensor.detach().clone() for name, tensor in flat(states(trained.state)).items()}


def _label(name: str, timed: str) -> str:
    if name not in PEERS:
        return name
    synced = PEERS[name].synced
    if timed == "done":
        return f"{name} ({'fsync' if synced else 'no fsync'})"
    return f"{name} + fsync" if timed.endswith("durable") and not synced else name


# ── one contender ────────────────────────────────────────────────────────────────────────────────────────────


def _measure(name: str, directory: Path, tiny: bool, device: str) -> Report:
    if name in _LIMITS:
        return _limit(name, directory, tiny, device)
    contender = CONTENDERS[name](directory, device)
    trained = build(tiny=tiny, device=device)
    report: Report = {}
    saves = _saves(tiny)
    for number in range(saves):
        trained.step()
        expected = copies(trained) if number == saves - 1 else None
        gc.collect()
        os.sync()
        path = directory / f"save-{number}"
        for timed, seconds in _save(contender, trained, path, change=expected is not None).items():
            key = timed if number else f"first {timed}"
            if key in _ROWS:
                report.setdefault(key, []).append(seconds)
        if expected is not None:
            check(contender, path, expected, tiny=tiny)
        remove(path)
    contender.close()
    return report


def _save(contender: Contender, trained: Trained, path: Path, *, change: bool) -> dict[str, float]:
    def update() -> None:
        if contender.device != "cpu":
            torch.cuda.current_stream().synchronize()  # what copies on a stream of its own does not hold training up
        times.append(time.perf_counter())
        if change:
            change_all(trained)

    _synchronize(contender.device)
    times = [time.perf_counter()]
    contender.save_async(trained.state, path)
    times.append(time.perf_counter())
    with contender.updating():
        in_step(trained, update)
    contender.wait()
    times.append(time.perf_counter())
    if not contender.synced:
        fsync_all(path)
    times.append(time.perf_counter())
    seconds = [now - times[0] for now in times[1:]]
    # While the state changes, the clock runs: of the save that is checked only the start is a time of the tool.
    return dict(zip(("returns", "waits") if change else ("returns", "waits", "done", "durable"), seconds, strict=False))


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _saves(tiny: bool) -> int:
    return 3 if tiny else 5  # in one process: a first one, later ones, and the last of them is checked


def _limit(name: str, directory: Path, tiny: bool, device: str) -> Report:
    state_bytes = size_bytes(build(tiny=tiny, device="meta"))
    source = torch.ones(state_bytes, dtype=torch.uint8, device=device)  # ones: zeros would be no memory of their own
    memory = mmap.mmap(-1, state_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    into = torch.frombuffer(memory, dtype=torch.uint8).fill_(2)
    if device != "cpu":
        into = torch.empty(state_bytes, dtype=torch.uint8, pin_memory=True)
    if name == _NEW:  # no row where there is no room: snapshots lie elsewhere then
        place = default_directory(state_bytes)
        return {"first waits": [_new_write(place, memory) for _ in range(_saves(tiny))]} if place else {}
    seconds = []
    for _ in range(_saves(tiny)):
        os.sync()
        _synchronize(device)
        started = time.perf_counter()
        if name == _COPY:
            into.copy_(source)
        else:
            _direct_write(directory / "direct", memory)
        seconds.append(time.perf_counter() - started)
    timed = "waits" if name == _COPY else "durable"
    return {f"first {timed}": seconds, timed: seconds}


def _new_write(place: Path, memory: mmap.mmap) -> float:
    """Write to new files at a place, one for every core; return the seconds."""
    count = os.cpu_count() or 1
    share = -(-len(memory) // count)
    shares = [memoryview(memory)[number * share : (number + 1) * share] for number in range(count)]
    with tempfile.TemporaryDirectory(dir=place) as new, ThreadPoolExecutor(count) as threads:
        files = [os.open(os.path.join(new, str(number)), os.O_CREAT | os.O_WRONLY) for number in range(count)]
        started = time.perf_counter()
        list(threads.map(os.write, files, shares))
        seconds = time.perf_counter() - started
        for file in files:
            os.close(file)
    return seconds


def _direct_write(path: Path, memory: mmap.mmap) -> None:
    path.unlink(missing_ok=True)
    flags = os.O_CREAT | os.O_WRONLY | getattr(os, "O_DIRECT", 0)
    whole = len(memory) - len(memory) % 4096
    view, fd = memoryview(memory), os.open(path, flags, 0o600)
    for begin in range(0, whole, 16 << 20):
        os.pwrite(fd, view[begin : min(whole, begin + (16 << 20))], begin)
    os.fsync(fd)
    os.close(fd)


if __name__ == "__main__":
    answer(_measure)
