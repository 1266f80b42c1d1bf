"""What is swept, and `python -m tests.crash.victim`: a process that forks others to be killed in the middle of it.

It reads lines "operation directory root n mode", and forks a process for each that does the operation and is killed at
its n-th call. The answer is a line: "killed", "lived" where that call failed by itself (a name was taken), or "done"
where it never came to it. Forked, because importing torch takes a hundred times as long as a save.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

from ckpt_tasks.checkpoint.importing import ImportedRun
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.checkpoint.transfer.fork import plan_fork, run_fork
from ckpt_tasks.checkpoint.transfer.importing.plan import plan_import
from ckpt_tasks.checkpoint.transfer.syncing import plan_sync, run_sync
from ckpt_tasks.errors import CkptError, NoGoodCheckpointError, StoreError
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.local_fs import Calls
from ckpt_tasks.testing import die, located
from tests.support.calls import FailingCalls, Mode
from tests.support.runs import EXPECTED, UNTOUCHED, check_run, fingerprint, head_of, opened, options, state_of, train

CHANGED = {"lr": 0.5}


def prepare(directory: Path) -> None:
    """Make what the operations begin with: a run of which the next save retires a checkpoint, and a foreign file."""
    train(directory / "base", 1, 2, 3)
    state = state_of(2)
    saved = {name: state[name].state_dict() for name in ("model", "optimizer")}
    torch.save({**saved, "extra": state["extra"]}, directory / "source.pt")


@dataclass(frozen=True)
class Operation:
    """What is done to the run directory `root` with what `prepare` has made in `directory`.

    `do` makes its calls through `calls`. `check_half` says what holds wherever it was broken off, `stands` whether it
    is done, `finish` does it again where it is not, and checks the run. `fewest`: a sweep of fewer calls has swept
    nothing.
    """

    do: Callable[[Path, Path, Calls], object]
    stands: Callable[[Path], bool]
    check_half: Callable[[Path], None]
    finish: Callable[[Path, Path], None]
    fewest: int = 45
    base: str = ""  # what is copied to `root` before

    def begin(self, directory: Path, *names: object) -> Path:
        """Make `root` as it is before."""
        root = directory / "-".join(map(str, names)).replace(" ", "-")
        return copied(directory / self.base, root) if self.base else root


def copied(run: Path, root: Path) -> Path:
    """Copy a run without the temporary files of a fork that was killed while it read the run."""
    return shutil.copytree(run, root, ignore=shutil.ignore_patterns(".tmp-*"))


def run_at(root: Path, calls: Calls) -> Run:
    history = History(LocalStore(root, calls=calls))
    return Run(history, history.check(None))


def newest(root: Path) -> int:
    return max(head_of(root).live, key=lambda checkpoint: checkpoint.n).step


def save(directory: Path, root: Path, calls: Calls, kept: int = 2) -> None:
    """Take the directory, restore step 3, save step 4, commit, retire and delete, and let it go."""
    ckpt = opened(root, calls=calls, max_num_checkpoints=kept)
    try:
        target = state_of(UNTOUCHED)
        assert ckpt.restore(target) == 3
        assert fingerprint(target) == EXPECTED[3]
        assert ckpt.save(4, state_of(4)).step == 4
        ckpt.close()
    except CkptError as error:
        if ckpt.last_commit is not None:
            raise AssertionError("what fails after the commit is upkeep: the next save does it") from error
        raise
    finally:
        die(ckpt)


def old_or_new(root: Path) -> None:
    assert newest(root) in (3, 4)


class WithoutLinks:
    """Calls on two file systems: a file of one can have no name on the other."""

    def __init__(self, calls: Calls):
        self._calls = calls

    def __getattr__(self, name: str) -> object:
        return getattr(self._calls, name)

    def link(self, old: object, new: object) -> None:
        if ".tmp-" not in str(old):
            raise OSError(18, "Invalid cross-device link")
        self._calls.link(str(old), str(new))


def fork(directory: Path, root: Path, calls: Calls, *, linked: bool = True) -> None:
    """Fork step 3 of the base; what is not linked is sent."""
    calls = calls if linked else cast("Calls", WithoutLinks(calls))
    run, store = run_at(directory / "base", calls), LocalStore(root, calls=calls)
    run_fork(run, store, plan_fork(run, run.find(3), store, CHANGED))


def half_is_none(root: Path) -> None:
    """Where there is no entry nobody trains: either nothing is there, or what is there is refused."""
    if head_of(root).live:
        return
    if not any(root.glob("checkpoint_*/*/[!.]*")):
        assert not (root / "format.json").exists()
        return  # as new
    with pytest.raises(NoGoodCheckpointError, match="no ledger"):
        opened(root).restore(state_of(UNTOUCHED))


def finish_fork(directory: Path, root: Path) -> None:
    """Fork again, also where the fork stands."""
    fork(directory, root, os)
    state = head_of(root)
    assert state.origin is not None
    assert (state.origin.step, state.origin.set, state.params) == (3, CHANGED, CHANGED)
    for path in root.glob("checkpoint_*/*/.tmp-*"):
        path.unlink()  # of the manifest, which is put if absent; every reader ignores it
    check_run(root, 3)


def import_file(directory: Path, root: Path, calls: Calls) -> None:
    """Import the foreign file as step 2."""
    store = LocalStore(root, calls=calls)
    ImportedRun(options(located(store))).add(plan_import(directory / "source.pt", step=2))


def finish_import(directory: Path, root: Path) -> None:
    """Import again where nothing stands."""
    if not head_of(root).live:
        import_file(directory, root, os)
    check_run(root, 2)


def evaluate(directory: Path, root: Path, calls: Calls) -> None:
    """Lease the newest checkpoint, restore a part of it, and record an evaluation."""
    run = run_at(root, calls)
    newest = run.find("latest")
    with run.lease(newest, "evaluator"):
        assert run.restore(newest, {"model": state_of(UNTOUCHED)["model"]}, partial=True).step == 3
    assert run.record_evaluation(newest, "quick", {"loss": 0.5})


def verify(directory: Path, root: Path, calls: Calls) -> None:
    """Verify every byte."""
    faults = verify_run_directory(run_at(root, calls).history)
    unread = [fault for _, found in faults.checkpoints.values() for fault in found] + list(faults.damaged)
    if unread:  # a person is shown all that cannot be read, and that it could not be read
        raise StoreError("; ".join(unread))


def sync(directory: Path, root: Path, calls: Calls) -> None:
    """Copy the run to a directory beside."""
    run, target = run_at(root, calls), LocalStore(root.with_name(root.name + "-copy"), calls=calls)
    report = run_sync(run, target, plan_sync(run, target))
    assert [row.outcome for row in report.rows] == ["copied"] * 2


def fork_beside(directory: Path, root: Path, calls: Calls) -> None:
    """Fork the newest checkpoint to a directory beside."""
    run, target = run_at(root, calls), LocalStore(root.with_name(root.name + "-fork"), calls=calls)
    run_fork(run, target, plan_fork(run, run.find("latest"), target, {}))


# What reads a run; a call that changes something is swept above, or by the tests of copies.
READERS: dict[str, Callable[[Path, Path, Calls], None]] = {
    "save": save, "evaluate": evaluate, "verify": verify, "fork": fork_beside, "sync": sync,
}  # fmt: skip

_SAVE = Operation(
    save, lambda root: newest(root) == 4, old_or_new, lambda _, root: check_run(root, newest(root)), 70, "base"
)
_FORK = Operation(fork, lambda root: bool(head_of(root).live), half_is_none, finish_fork)
OPERATIONS = {
    "save": _SAVE,
    "save of one": Operation(partial(save, kept=1), _SAVE.stands, old_or_new, _SAVE.finish, 70, "base"),
    "fork": _FORK,
    "fork to another disk": Operation(partial(fork, linked=False), _FORK.stands, half_is_none, finish_fork),
    "import": Operation(import_file, _FORK.stands, lambda root: None, finish_import),
}


def main() -> None:
    """For each line fork a process that acts on it; it says whether it came to the call, if it lived."""
    for line in sys.stdin:
        operation, directory, root, n, mode = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                calls = FailingCalls(int(n), cast("Mode", mode))
                OPERATIONS[operation].do(Path(directory), Path(root), calls)
                status = 2 if calls.reached else 0
            except BaseException:  # noqa: BLE001 (a forked child ends here)
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        print({0: "done", 9: "killed", 2 << 8: "lived"}.get(status, f"status {status}"), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
