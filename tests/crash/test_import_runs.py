"""Kill or fail an import at every call that changes the disk: half of one is no checkpoint, and again it finishes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_tasks.errors import CkptError
from tests.crash.import_victim import make_import
from tests.support.calls import FailingCalls, Mode
from tests.support.runs import check_run, head_of, state_of
from tests.support.sweeps import KILLED_AFTER, LANDED, Victim, failing_calls, strides, victim_of

FEWEST_CALLS = 45  # a sweep that ends before has not swept a whole import


@pytest.fixture(scope="module")
def source(fast_dir: Path) -> Path:
    state = state_of(2)
    saved = {name: state[name].state_dict() for name in ("model", "optimizer")}
    torch.save({**saved, "extra": state["extra"]}, fast_dir / "source.pt")
    return fast_dir / "source.pt"


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    with victim_of("-m", "tests.crash.import_victim") as victim:
        yield victim


def finished(source: Path, target: Path) -> None:
    """Import it again if nothing stands; then it is whole, trains on, and sweeps what was left."""
    if not head_of(target).live:
        make_import(source, target, FailingCalls(0, "refused"))
    check_run(target, 2)


@strides(19)
@pytest.mark.parametrize("mode", ["killed before", KILLED_AFTER])
def test_killed_at_any_call_the_same_import_finishes(
    source: Path, fast_dir: Path, victim: Victim, mode: Mode, stride: int
) -> None:
    """P30: SIGKILL at every call: there is no checkpoint or the whole one, and the same command finishes it."""
    for n in victim.deaths(stride, FEWEST_CALLS):
        target = fast_dir / f"{mode.replace(' ', '-')}-{n}"
        ended = victim.strike(source, target, n, mode)
        assert head_of(target).live or ended == "killed"
        finished(source, target)
        shutil.rmtree(target)


@strides(19)
@pytest.mark.parametrize("mode", ["refused", LANDED])
def test_whatever_call_fails_the_same_import_finishes(source: Path, fast_dir: Path, mode: Mode, stride: int) -> None:
    """P28, P30: a call that fails, or whose answer is lost, leaves no checkpoint or the whole one."""
    for calls in failing_calls(mode, stride, FEWEST_CALLS):
        target = fast_dir / mode
        try:
            make_import(source, target, calls)
        except CkptError:
            pass
        else:
            assert head_of(target).live, calls.where
        finished(source, target)
        shutil.rmtree(target)
