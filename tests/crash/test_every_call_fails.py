"""Fail the n-th call that changes the disk, for n = 1, 2, 3 … until a save ends without reaching n.

What is swept is a whole life of a process: take the directory, restore, save, commit, retire and delete the oldest
checkpoint, let the directory go.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import CkptError, CommitUncertainError
from tests.support.calls import Mode
from tests.support.runs import EXPECTED, UNTOUCHED, check_run, died, fingerprint, head_of, opened, state_of, train
from tests.support.sweeps import KILLED_AFTER, LANDED, Victim, failing_calls, strides, victim_of

FEWEST_CALLS = 70  # a sweep that ends before has not swept a whole save


@pytest.fixture(scope="module")
def base(fast_dir: Path) -> Path:
    """Make a run with steps 1, 2, 3, two of which are to be kept: the next save retires and deletes one."""
    train(fast_dir / "base", 1, 2, 3)
    return fast_dir / "base"


def live_through(ckpt: Checkpointer) -> tuple[int | None, CkptError | None]:
    """Restore, save and close; return the step that was reported as committed, and the error that ended it."""
    committed = None
    try:
        target = state_of(UNTOUCHED)
        committed = ckpt.restore(target)
        assert fingerprint(target) == EXPECTED[committed]
        committed = ckpt.save(4, state_of(4)).step
        ckpt.close()
    except CkptError as error:
        return committed, error
    return committed, None


@strides(9)
@pytest.mark.parametrize("kept", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["refused", "landed"])
def test_whatever_call_fails_the_newest_checkpoint_is_the_old_or_the_new_one(
    base: Path, fast_dir: Path, mode: Mode, kept: int, stride: int
) -> None:
    """P28, P30, P31, P46: at every failed call, refused or with its answer lost, the next process restores exactly.

    Where two are kept, the commit retires; where one is kept, an entry of its own does, as the new one is read back.
    """
    for calls in failing_calls(mode, stride, FEWEST_CALLS):
        root = shutil.copytree(base, fast_dir / f"{mode}-{kept}")
        ckpt = opened(root, calls=calls, max_num_checkpoints=kept)
        reported, error = live_through(ckpt)
        died(ckpt)
        newest = max(head_of(root).live, key=lambda c: c.n).step
        assert newest in (3, 4)
        assert newest == 4 or reported != 4, calls.where
        # An error of the save says that the old one is still the newest, or that nobody can know.
        assert error is None or newest == 3 or isinstance(error, CommitUncertainError), (calls.where, error)
        # A write, fsync or name of the data that failed is never committed, also where the bytes are there.
        data = "/checkpoint_" in calls.where and not calls.where.startswith("unlink")
        assert not data or (error is not None and newest == 3), calls.where
        # What fails after the commit is upkeep: the next save does it.
        assert error is None or ckpt.last_commit is None, (calls.where, error)
        check_run(root, newest)
        shutil.rmtree(root)


@strides(9)
@pytest.mark.parametrize("mode", ["refused", LANDED])
def test_the_same_process_can_try_again_after_any_failed_call(
    base: Path, fast_dir: Path, mode: Mode, stride: int
) -> None:
    """P32: after any failed call the same Checkpointer restores and saves the same step again, beside what was left."""
    for calls in failing_calls(mode, stride, FEWEST_CALLS):
        root = shutil.copytree(base, fast_dir / f"again-{mode}")
        ckpt = opened(root, calls=calls)
        reported, error = live_through(ckpt)
        if error is not None:
            target = state_of(UNTOUCHED)
            assert ckpt.restore(target) == max(head_of(root).live, key=lambda c: c.n).step
            ckpt.save(4, state_of(4))
            ckpt.close()
        else:
            assert reported == 4
        check_run(root, 4)
        shutil.rmtree(root)


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    with victim_of("-m", "tests.crash.victim") as victim:
        yield victim


@strides(9)
@pytest.mark.parametrize("mode", ["killed before", KILLED_AFTER])
def test_killed_at_any_call_the_run_goes_on(
    base: Path, fast_dir: Path, victim: Victim, mode: Mode, stride: int
) -> None:
    """P30, P31, P67: SIGKILL at every call: the next process takes the directory, restores exactly, sweeps the rest."""
    for n in victim.deaths(stride, FEWEST_CALLS):
        root = shutil.copytree(base, fast_dir / f"{mode.replace(' ', '-')}-{n}")
        ended = victim.strike(root, n, mode)
        newest = max(head_of(root).live, key=lambda c: c.n).step
        assert newest in (3, 4)
        assert newest == 4 or ended == "killed"
        check_run(root, newest)
        shutil.rmtree(root)
