"""A long history, and many live checkpoints: to find the newest, and to add one, on the local disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.apart import summary
from ckpt_tasks.format.keys import MANIFEST_NAME, Attempt, attempt_prefix, ledger_name
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.local import LocalStore

__all__ = ["measure", "some_checkpoint"]


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Time both, and beside them one os.listdir and one 1 KiB file that is written, fsynced and linked.

    The entries are real ones; all but the last are written past the store, which would fsync each.
    """
    count = 100 if tiny else 10_000
    history = History(LocalStore(directory))
    history.create("history")
    first = history.append({"kind": "note", "note": "first"}, lambda state, n: state, owner=None)
    for n in range(1, count):
        (directory / ledger_name(n)).write_bytes(replace(first, n=n).to_bytes()[0])
    found: dict[str, dict[str, list[float]]] = {"newest": {}, "append": {}}
    works: list[tuple[str, str, Callable[[], object]]] = [
        ("newest", "ckpt-tasks", history.head),
        ("newest", "os.listdir", lambda: max(os.listdir(directory / "ledger"))),
        ("append", "ckpt-tasks", lambda: history.append({"kind": "note", "note": "x"}, lambda s, n: s, owner=None)),
        ("append", "one durable file", lambda: _durable(directory)),
    ]
    for _ in range(rounds):
        for row, name, work in works:
            began = time.perf_counter()
            work()
            found[row].setdefault(name, []).append(time.perf_counter() - began)
    shutil.rmtree(directory)
    for live in (10, 100) if tiny else (10, 1_000, 10_000, 50_000):
        seconds, size_bytes = _commits(directory / str(live), live, rounds)
        row = f"commit with {live:,} live: CPU; {size_bytes:,} bytes"
        found[row] = {"ckpt-tasks": seconds}
    labels = {"newest": f"newest of {count:,} commits", "append": f"commit number {count + 1:,}, the entry alone"}
    return {
        "size_bytes": 0,
        "rounds": rounds,
        "device": device,
        "rows": {
            labels.get(row, row): {name: summary(times) for name, times in cells.items()}
            for row, cells in found.items()
        },
    }


def _commits(directory: Path, live: int, rounds: int) -> tuple[list[float], int]:
    """Return the seconds of CPU of each commit to a run with so many live checkpoints, and the median of its bytes."""
    store = LocalStore(directory)
    History(store).create("many")
    first = History(store).append({"kind": "note", "note": "first"}, lambda state, n: state, owner=None)
    (directory / ledger_name(live + 1)).write_bytes(replace(first, n=live + 1).to_bytes()[0])
    history = History(store)
    steps = tuple(some_checkpoint(n) for n in range(1, live + 1))
    history.append({"kind": "note", "note": "many"}, lambda state, n: replace(state, live=steps), owner=None)
    found: list[float] = []
    sizes = [_size_bytes(directory)]
    for _ in range(max(rounds, 9)):
        began = time.process_time()
        history.append(
            {"kind": "commit"},
            lambda state, n: state.with_checkpoint(some_checkpoint(n), frozenset()),
            owner=None,
        )
        found.append(time.process_time() - began)
        sizes.append(_size_bytes(directory))
    shutil.rmtree(directory)
    return found, sorted(after - before for before, after in pairwise(sizes))[len(found) // 2]


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.json"))


def some_checkpoint(n: int) -> Checkpoint:
    """Return the record of a checkpoint that is not there, for long lists."""
    attempt = Attempt(n, 1, f"{n:016x}")
    return Checkpoint(
        step=n,
        attempt=attempt.name,
        manifest=attempt_prefix(attempt) + MANIFEST_NAME,
        manifest_digest=f"{n:032x}",
        parent=f"{n - 1:032x}",
        n=n,
        metrics={"loss": 1 / n},
        size_bytes=1 << 30,
        objects=5,
        saved_at="2026-11-20T14:45:55.981+00:00",
        cost_s=0.022459,
    )


def _durable(directory: Path) -> None:
    temporary, name = directory / "one.tmp", directory / f"one-{time.monotonic_ns()}"
    fd = os.open(temporary, os.O_CREAT | os.O_WRONLY)
    os.write(fd, bytes(1024))
    os.fsync(fd)
    os.close(fd)
    os.link(temporary, name)
    above = os.open(directory, os.O_RDONLY)
    os.fsync(above)
    os.close(above)
    os.unlink(temporary)
