"""A long history: to find the newest of 10,000 commits, and to add one, on the local disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.apart import summary
from ckpt_tasks.checkpoint.history import History
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.storage.local import LocalStore

__all__ = ["measure"]


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
    labels = {"newest": f"newest of {count:,} commits", "append": f"commit number {count + 1:,}, the entry alone"}
    return {
        "size_bytes": 0,
        "rounds": rounds,
        "device": device,
        "rows": {labels[row]: {name: summary(times) for name, times in cells.items()} for row, cells in found.items()},
    }


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
