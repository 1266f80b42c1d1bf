"""Fail the n-th read of the disk with EIO, for n = 1, 2, 3 … until a whole life of a run ends without reaching n.

The counterpart of test_every_call_fails.py. What is swept: take the directory, restore, save, commit, prune, beat;
lease and evaluate; verify; fork; sync. An I/O error says nothing about what was written. So one that happens once
changes nothing at all, and one that stays is an error: never an older step, never a deleted checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.copying.fork import plan_fork, run_fork
from ckpt_tasks.copying.syncing import plan_sync, run_sync
from ckpt_tasks.errors import CkptError, CommitUncertainError, IntegrityError, StoreError
from ckpt_tasks.ledger.history import History
from ckpt_tasks.reading.reading import Run
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.local_fs import Calls
from ckpt_tasks.testing import look, under_way
from ckpt_tasks.upkeep.upkeep import verify_run_directory
from tests.support.calls import FailingReads
from tests.support.runs import EXPECTED, UNTOUCHED, check_run, faults_of, fingerprint, head_of, opened, state_of, train
from tests.support.systems import Sleepless, running_on

STEPS = [2, 3]  # of the base; the policy keeps two, so the save of step 4 retires step 2


@pytest.fixture(autouse=True)
def _no_pauses() -> Iterator[None]:
    """Read again at once: thousands of reads fail here."""
    with running_on(Sleepless()):
        yield


@pytest.fixture(scope="module")
def base(fast_dir: Path) -> Path:
    train(fast_dir / "base", 1, *STEPS)
    return fast_dir / "base"


def train_on(root: Path, calls: Calls) -> None:
    """Take the directory, restore, save step 4, prune, and let it go."""
    ckpt = opened(root, calls=calls)
    try:
        target = state_of(UNTOUCHED)
        step = ckpt.restore(target)
        assert step == STEPS[-1], "an older step was restored in silence"
        assert fingerprint(target) == EXPECTED[step]
        assert ckpt.save(4, state_of(4)).step == 4
        look(ckpt)
    finally:
        ckpt.close()
        assert under_way(ckpt).owner is None


def run_at(root: Path, calls: Calls) -> Run:
    history = History(LocalStore(root, calls=calls))
    return Run(history, history.check(None))


def evaluate(root: Path, calls: Calls) -> None:
    """Lease the newest checkpoint, restore a part of it, and record an evaluation."""
    run = run_at(root, calls)
    newest = run.find("latest")
    target = {"model": state_of(UNTOUCHED)["model"]}
    with run.lease(newest, "evaluator"):
        assert run.restore(newest, target, partial=True).step == STEPS[-1]
    assert run.record_evaluation(newest, "quick", {"loss": 0.5})


def verify(root: Path, calls: Calls) -> None:
    """Verify every byte."""
    faults = verify_run_directory(run_at(root, calls).history)
    unread = [fault for _, found in faults.checkpoints.values() for fault in found] + list(faults.damaged)
    if unread:  # a person is shown all that cannot be read, and that it could not be read
        raise StoreError("; ".join(unread))


def fork(root: Path, calls: Calls) -> None:
    """Fork the newest checkpoint to a directory beside."""
    run, target = run_at(root, calls), LocalStore(root.with_name(root.name + "-fork"), calls=calls)
    run_fork(run, target, plan_fork(run, run.find("latest"), target, {}))


def sync(root: Path, calls: Calls) -> None:
    """Copy the run to a directory beside."""
    run, target = run_at(root, calls), LocalStore(root.with_name(root.name + "-copy"), calls=calls)
    report = run_sync(run, target, plan_sync(run, target))
    assert [row.outcome for row in report.rows] == ["copied"] * len(STEPS)


Life = Callable[[Path, Calls], None]


def live_of(root: Path) -> list[int]:
    return sorted(checkpoint.step for checkpoint in head_of(root).live)


def entries_of(root: Path) -> list[tuple[str, Any]]:
    """List what the ledger says has happened, oldest first."""
    history = History(LocalStore(root))
    said = [history.read_entry(n)[0].event for n in range(history.head().next_n)]
    return [(event["kind"], event.get("step")) for event in said]


# The quick form fails every seventh read, the long one each.
EVERY = pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])


def copies(base: Path, fast_dir: Path, name: str, stride: int) -> Iterator[tuple[int, Path]]:
    """Give n = 1, 1 + stride … each with a copy of the run; it and what stands beside it is removed afterwards."""
    for n in count(1, stride):
        root = fast_dir / f"{name}-{n}"
        shutil.copytree(base, root)
        yield n, root
        for beside in fast_dir.glob(f"{root.name}*"):
            shutil.rmtree(beside)


@EVERY
@pytest.mark.parametrize("life", [train_on, evaluate, verify, fork, sync])
def test_a_read_that_fails_once_changes_nothing(base: Path, fast_dir: Path, life: Life, stride: int) -> None:
    """P35, P49: after one EIO at any read the run is as it would be without it: no error, no older step, no damage."""
    expected: list[tuple[str, Any]] = []
    for n, root in copies(base, fast_dir, f"once-{life.__name__}", stride):
        if not expected:
            whole = root.with_name(f"{root.name}-whole")
            shutil.copytree(base, whole)
            life(whole, FailingReads(0))
            expected = entries_of(whole)
        calls = FailingReads(n)
        life(root, calls)
        assert entries_of(root) == expected, calls.where
        assert faults_of(root) == {}, calls.where
        assert live_of(root) == ([3, 4] if life is train_on else STEPS), calls.where
        if not calls.reached:
            break
    assert n > 20


@EVERY
@pytest.mark.parametrize(
    "life", [pytest.param(life, marks=pytest.mark.slow) for life in (train_on, sync)] + [evaluate, verify, fork]
)
def test_a_disk_that_stops_answering_is_an_error_and_loses_nothing(
    base: Path, fast_dir: Path, life: Life, stride: int
) -> None:
    """P35, P49: where reads fail from the n-th on, StoreError says so, and what was committed is live and whole."""
    for n, root in copies(base, fast_dir, f"forever-{life.__name__}", stride):
        calls = FailingReads(n, forever=True)
        error: CkptError | None = None
        try:
            life(root, calls)
        except CkptError as caught:
            error = caught
        assert not isinstance(error, IntegrityError), (calls.where, error)
        assert error is None or isinstance(error, StoreError | CommitUncertainError), (calls.where, error)
        live = live_of(root)
        assert STEPS[-1] in live, calls.where
        assert live in (STEPS, [*STEPS, 4], [3, 4]), calls.where
        assert faults_of(root) == {}, calls.where
        if not calls.reached:
            assert error is None
            break
        if life is train_on:
            check_run(root, live[-1])
    assert n > 20
