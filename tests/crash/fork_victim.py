"""A process that forks others to be killed: `python -m tests.crash.fork_victim`, lines "source target n mode" on stdin.

Each line forks a process that makes a run at `target` from step 3 of `source`, and is killed at its n-th call to either
of the two. The answers are those of tests/crash/victim.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ckpt_tasks.copying.fork import plan_fork, run_fork
from ckpt_tasks.ledger.history import History
from ckpt_tasks.reading.reading import Run
from ckpt_tasks.storage.local import LocalStore
from tests.crash.victim import serve
from tests.support.calls import FailingCalls, Mode, WatchedCalls

CHANGED = {"lr": 0.5}


class WithoutLinks(FailingCalls):
    """Calls on two file systems: a file of one can have no name on the other."""

    def link(self, old: object, new: object) -> None:
        if ".tmp-" not in str(old):
            raise OSError(18, "Invalid cross-device link")
        super().link(old, new)


def make_fork(source: Path, target: Path, calls: WatchedCalls) -> None:
    history = History(LocalStore(source, calls=calls))
    run, store = Run(history, history.check(None)), LocalStore(target, calls=calls)
    run_fork(run, store, plan_fork(run, run.find(3), store, CHANGED))


def act(words: list[str]) -> bool:
    source, target, n, mode, way = words
    calls = (FailingCalls if way == "linked" else WithoutLinks)(int(n), cast("Mode", mode))
    make_fork(Path(source), Path(target), calls)
    return calls.reached


if __name__ == "__main__":
    serve(act)
