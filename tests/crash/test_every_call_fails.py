"""Fail the n-th call that changes the disk, or be killed at it, for n = 1, 2, 3 … until an operation never comes to it.

What is swept are the operations of victim.py, each a whole life of a process. The same for reads, which fail once or
from the n-th on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from ckpt_tasks.errors import CkptError, CommitUncertainError, IntegrityError, StoreError
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.local import LocalStore
from tests.crash.victim import OPERATIONS, READERS, copied, fork, newest, prepare
from tests.support.calls import FailingReads, Mode, WatchedCalls
from tests.support.runs import UNTOUCHED, check_run, faults_of, head_of, opened, state_of
from tests.support.sweeps import SLOW, SOAK, Victim, failing_calls, quick_first, strides, victim_of
from tests.support.systems import Sleepless, running_on

# The quick form strikes every so many calls of these, `make test-all` each one of a save, `make soak` of all.
QUICK = {
    ("save", "refused"): 23, ("save", "landed"): 41, ("fork", "refused"): 47,
    ("save", "killed before"): 37, ("fork", "killed before"): 59,
}  # fmt: skip


def sweeps(*modes: Mode) -> pytest.MarkDecorator:
    """Let a test sweep the operations in these modes: (operation, mode, every which call)."""
    quick = [pytest.param(*case, stride) for case, stride in QUICK.items() if case[1] in modes]
    long = [
        pytest.param(name, mode, stride, marks=SLOW if stride == (1 if name == "save" else 7) else SOAK)
        for name in OPERATIONS
        for mode in modes
        for stride in ((1,) if name == "save" else (7, 1))
    ]
    return pytest.mark.parametrize(("name", "mode", "stride"), quick + long)


@pytest.fixture(scope="module")
def directory(fast_dir: Path) -> Path:
    prepare(fast_dir)
    return fast_dir


@sweeps("refused", "landed")
def test_whatever_call_fails_the_same_again_finishes(directory: Path, name: str, mode: Mode, stride: int) -> None:
    """P28, P30, P31, P46: at every call, refused or with its answer lost, the old or the new stands whole.

    The next process restores exactly, and sweeps the rest. Where two are kept, a save's commit retires; where one is
    kept, an entry of its own does, as the new checkpoint is read back.
    """
    operation = OPERATIONS[name]
    for calls in failing_calls(mode, stride, operation.fewest):
        root, error = operation.begin(directory, name, mode), None
        try:
            operation.do(directory, root, calls)
        except CkptError as caught:
            error = caught
        assert error is not None or operation.stands(root), calls.where
        operation.check_half(root)
        if name.startswith("save"):
            # An error says that the old one is still the newest, or that nobody can know.
            assert error is None or not operation.stands(root) or isinstance(error, CommitUncertainError), calls.where
            # A write, fsync or name of the data that failed is never committed, also where the bytes are there.
            data = "/checkpoint_" in calls.where and not calls.where.startswith("unlink")
            assert not data or not operation.stands(root), calls.where
        operation.finish(directory, root)
        shutil.rmtree(root)


@pytest.mark.parametrize(
    ("mode", "stride"),
    [
        ("refused", 37),
        *(pytest.param(mode, 3, marks=SLOW) for mode in ("refused", "landed")),
        *(pytest.param(mode, 1, marks=SOAK) for mode in ("refused", "landed")),
    ],
)
def test_the_same_process_can_try_again_after_any_failed_call(directory: Path, mode: Mode, stride: int) -> None:
    """P32: after any failed call the same Checkpointer restores and saves the same step again, beside what was left."""
    for calls in failing_calls(mode, stride, OPERATIONS["save"].fewest):
        root = OPERATIONS["save"].begin(directory, "again", mode)
        ckpt = opened(root, calls=calls)
        for last in (False, True):
            try:
                assert ckpt.restore(state_of(UNTOUCHED)) == newest(root)
                ckpt.save(4, state_of(4))
                ckpt.close()
                break
            except CkptError:
                assert not last
        check_run(root, 4)
        shutil.rmtree(root)


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    with victim_of("-m", "tests.crash.victim") as victim:
        yield victim


@sweeps("killed before", "killed after")
def test_killed_at_any_call_the_same_again_finishes(
    directory: Path, victim: Victim, name: str, mode: Mode, stride: int
) -> None:
    """P30, P31, P67: SIGKILL at every call: the old or the new stands; the next process goes on, sweeps the rest."""
    operation = OPERATIONS[name]
    for n in victim.deaths(stride, operation.fewest):
        root = operation.begin(directory, name, mode, n)
        ended = victim.strike(name, directory, root, n, mode)
        assert operation.stands(root) or ended == "killed"
        operation.check_half(root)
        operation.finish(directory, root)
        shutil.rmtree(root)


def test_names_are_durable_before_the_entry(directory: Path) -> None:
    """P46: every name of a fork is made durable before the next one is made, and the ledger's first one is the last."""
    calls = WatchedCalls()
    fork(directory, directory / "durable", calls)
    made = [(i, path) for i, (name, path) in enumerate(calls.log) if name == "link" and "/durable/" in path]
    assert [calls.log[i + 2] for i, _ in made] == [("fsync", str(Path(path).parent)) for _, path in made]
    assert "/ledger/" in made[-1][1]
    assert sum("/ledger/" in path for _, path in made) == 1


# ── reads ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def entries_of(root: Path) -> list[tuple[str, object]]:
    """List what the ledger says has happened, oldest first."""
    history = History(LocalStore(root))
    events = [history.read_entry(n)[0].event for n in range(history.head().next_n)]
    return [(event["kind"], event.get("step")) for event in events]


def copies(directory: Path, name: str, stride: int) -> Iterator[tuple[int, Path]]:
    """Give n = 1, 1 + stride … each with a copy of the run; it and what stands beside it is removed afterwards."""
    for n in count(1, stride):
        root = directory / f"{name}-{n}"
        copied(directory / "base", root)
        with running_on(Sleepless()):  # read again at once: thousands of reads fail here
            yield n, root
        for beside in directory.glob(f"{root.name}*"):
            shutil.rmtree(beside)


@strides(29, 5)
@pytest.mark.parametrize("name", quick_first(READERS, 2))
def test_a_read_that_fails_once_changes_nothing(directory: Path, name: str, stride: int) -> None:
    """P35, P49: after one EIO at any read the run is as it would be without it: no error, no older step, no damage.

    An I/O error says nothing about what was written.
    """
    whole = directory / f"{name}-whole"
    copied(directory / "base", whole)
    READERS[name](directory, whole, os)
    expected = entries_of(whole)
    for beside in directory.glob(f"{whole.name}*"):
        shutil.rmtree(beside)
    for n, root in copies(directory, f"once-{name}", stride):
        calls = FailingReads(n)
        READERS[name](directory, root, calls)
        assert entries_of(root) == expected, calls.where
        assert faults_of(root) == {}, calls.where
        if not calls.reached:
            break
    assert n > 20


@strides(29, 5)
@pytest.mark.parametrize("name", quick_first([*READERS][::-1], 3))
def test_a_disk_that_stops_answering_is_an_error_and_loses_nothing(directory: Path, name: str, stride: int) -> None:
    """P35, P49: where reads fail from the n-th on, StoreError says so, and what was committed is live and whole."""
    for n, root in copies(directory, f"forever-{name}", stride):
        calls = FailingReads(n, forever=True)
        error: CkptError | None = None
        try:
            READERS[name](directory, root, calls)
        except CkptError as caught:
            error = caught
        assert error is None or isinstance(error, StoreError | CommitUncertainError), (calls.where, error)
        assert not isinstance(error, IntegrityError), (calls.where, error)
        live = sorted(checkpoint.step for checkpoint in head_of(root).live)
        assert live in ([2, 3], [2, 3, 4], [3, 4]), calls.where
        assert faults_of(root) == {}, calls.where
        if not calls.reached:
            assert error is None
            break
        if name == "save":
            check_run(root, live[-1])
    assert n > 20
