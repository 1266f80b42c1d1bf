"""The protocol reaches clocks, threads and random numbers through ckpt_tasks/system.py, so that they can be given."""

from __future__ import annotations

import ast

from tests.house.sources import files, parse, where

ROOMS = ("ledger", "reading", "upkeep", "saving")
FILES = ("checkpoint/held_run.py", "checkpoint/checkpointer.py", "checkpoint/acquiring.py", "storage/retrying.py")
MODULES = ("time", "secrets", "random", "socket", "queue")
THREADS = ("Thread", "Lock", "RLock", "Event", "Condition", "Semaphore", "Timer", "local")


def made_elsewhere(call: ast.Call) -> bool:
    """Say whether a call goes to the standard library for what `System` gives."""
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
        return False
    module, name = call.func.value.id, call.func.attr
    return module in MODULES or (module == "threading" and name in THREADS)


def test_the_protocol_has_one_way_to_clocks_threads_and_chance() -> None:
    """P30, P32: no module of the protocol has a clock, a thread or a random number of its own: a seed is a schedule."""
    paths = [path for path in files("ckpt_tasks") if path.parent.name in ROOMS or str(path).endswith(FILES)]
    assert len(paths) > len(FILES) + 30
    calls = [(path, node) for path in paths for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]
    wrong = [where(path, call.lineno) for path, call in calls if made_elsewhere(call)]
    assert wrong == [], "call system().monotonic() and the like instead (ckpt_tasks/system.py)"
