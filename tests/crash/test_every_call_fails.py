"""Fail the n-th call that changes the disk, for n = 1, 2, 3 … until a save ends without reaching n.

The form is SQLite's I/O-error loop. What is swept is a whole life of a process: take the directory, restore, save,
commit, retire and delete the oldest checkpoint, let the directory go.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import CkptError, CommitUncertainError
from tests.support.calls import FailingCalls, Mode
from tests.support.runs import (
    EXPECTED,
    UNTOUCHED,
    check_run,
    died,
    fingerprint,
    head_of,
    opened,
    state_of,
    train,
)

# The quick form fails every fifth call, the long one each.
EVERY = pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
ROOT = Path(__file__).resolve().parents[2]
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


@EVERY
@pytest.mark.parametrize("kept", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["refused", "landed"])
def test_whatever_call_fails_the_newest_checkpoint_is_the_old_or_the_new_one(
    base: Path, fast_dir: Path, mode: Mode, kept: int, stride: int
) -> None:
    """P28, P30, P31, P46: at every failed call, refused or with its answer lost, the next process restores exactly.

    Where two are kept, the commit retires; where one is kept, an entry of its own does, as the new one is read back.
    """
    for n in count(1, stride):
        root = fast_dir / f"{mode}-{kept}-{n}"
        shutil.copytree(base, root)
        calls = FailingCalls(n, mode)
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
        if not calls.reached:
            break
    assert n > FEWEST_CALLS


@EVERY
@pytest.mark.parametrize("mode", ["refused", pytest.param("landed", marks=pytest.mark.slow)])
def test_the_same_process_can_try_again_after_any_failed_call(
    base: Path, fast_dir: Path, mode: Mode, stride: int
) -> None:
    """P32: after any failed call the same Checkpointer restores and saves the same step again, beside what was left."""
    for n in count(1, stride):
        root = fast_dir / f"again-{mode}-{n}"
        shutil.copytree(base, root)
        calls = FailingCalls(n, mode)
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
        if not calls.reached:
            break
    assert n > FEWEST_CALLS


@pytest.fixture(scope="module")
def victim() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.crash.victim"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@EVERY
@pytest.mark.parametrize("mode", ["killed before", pytest.param("killed after", marks=pytest.mark.slow)])
def test_killed_at_any_call_the_run_goes_on(
    base: Path, fast_dir: Path, victim: subprocess.Popen[str], mode: Mode, stride: int
) -> None:
    """P30, P31, P67: SIGKILL at every call: the next process takes the directory, restores exactly, sweeps the rest."""
    assert victim.stdin is not None
    assert victim.stdout is not None
    for n in count(1, stride):
        root = fast_dir / f"{mode.replace(' ', '-')}-{n}"
        shutil.copytree(base, root)
        victim.stdin.write(f"{root}\t{n}\t{mode}\n")
        victim.stdin.flush()
        ended = victim.stdout.readline().strip()
        assert ended in ("killed", "lived", "done")
        newest = max(head_of(root).live, key=lambda c: c.n).step
        assert newest in (3, 4)
        assert newest == 4 or ended == "killed"
        check_run(root, newest)
        shutil.rmtree(root)
        if ended == "done":
            break
    assert n > FEWEST_CALLS
