"""A process that forks others to be killed: `python -m tests.crash.import_victim`, lines "source target n mode".

Each line forks a process that imports a file into a run, and is killed at its n-th call to the run's store. The answers
are those of tests/crash/victim.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ckpt_tasks.checkpoint.importing import ImportedRun
from ckpt_tasks.copying.importing import plan_import
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.storage.local import LocalStore
from tests.crash.victim import serve
from tests.support.calls import FailingCalls, Mode, WatchedCalls
from tests.support.runs import options


def make_import(source: Path, target: Path, calls: WatchedCalls) -> Checkpoint:
    run = ImportedRun(options(target))
    run._history.store = LocalStore(target, calls=calls)
    return run.add(plan_import(source, step=2))


def act(words: list[str]) -> bool:
    source, target, n, mode = words
    calls = FailingCalls(int(n), cast("Mode", mode))
    make_import(Path(source), Path(target), calls)
    return calls.reached


if __name__ == "__main__":
    serve(act)
