"""Kill or fail a fork at every call that changes the disk: the same fork again finishes; half a fork is no run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_tasks.errors import CkptError, NoGoodCheckpointError
from tests.crash.fork_victim import CHANGED, make_fork
from tests.support.calls import FailingCalls, Mode, WatchedCalls
from tests.support.runs import UNTOUCHED, check_run, head_of, opened, state_of, train
from tests.support.sweeps import KILLED_AFTER, Victim, failing_calls, strides, victim_of

FEWEST_CALLS = {"linked": 45, "sent": 45}  # a sweep that ends before has not swept a whole fork


@pytest.fixture(scope="module")
def source(fast_dir: Path) -> Path:
    train(fast_dir / "source", 2, 3)
    return fast_dir / "source"


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    with victim_of("-m", "tests.crash.fork_victim") as victim:
        yield victim


def half_is_none(target: Path) -> None:
    """Where there is no entry nobody trains: either nothing is there, or what is there is refused."""
    if head_of(target).live:
        return
    if not any(target.glob("checkpoint_*/*/[!.]*")):
        assert not (target / "format.json").exists()
        return  # as new
    with pytest.raises(NoGoodCheckpointError, match="no ledger"):
        opened(target).restore(state_of(UNTOUCHED))


def finished(source: Path, target: Path) -> None:
    """The same fork again finishes; what stands is whole, trains on, and sweeps what was left."""
    make_fork(source, target, FailingCalls(0, "refused"))
    state = head_of(target)
    assert state.origin is not None
    assert (state.origin.step, state.origin.set, state.params) == (3, CHANGED, CHANGED)
    for path in target.glob("checkpoint_*/*/.tmp-*"):
        path.unlink()  # of the manifest, which is put if absent; every reader ignores it
    check_run(target, 3)


@strides(11)
@pytest.mark.parametrize("way", ["linked", pytest.param("sent", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["killed before", KILLED_AFTER])
def test_killed_at_any_call_the_same_fork_finishes(  # noqa: PLR0917 (fixtures and parameters)
    source: Path, fast_dir: Path, victim: Victim, mode: Mode, way: str, stride: int
) -> None:
    """P30: SIGKILL at every call: what is there is no run or the whole fork, and the same command finishes it."""
    for n in victim.deaths(stride, FEWEST_CALLS[way]):
        target = fast_dir / f"{mode.replace(' ', '-')}-{way}-{n}"
        ended = victim.strike(source, target, n, mode, way)
        assert head_of(target).live or ended == "killed"
        half_is_none(target)
        finished(source, target)
        shutil.rmtree(target)


@strides(11)
@pytest.mark.parametrize("mode", ["refused", "landed"])
def test_whatever_call_fails_the_same_fork_finishes(source: Path, fast_dir: Path, mode: Mode, stride: int) -> None:
    """P28, P30: a call that fails, or whose answer is lost, leaves no run or the whole fork; again, it finishes."""
    for calls in failing_calls(mode, stride, FEWEST_CALLS["linked"]):
        target = fast_dir / mode
        try:
            make_fork(source, target, calls)
        except CkptError:
            half_is_none(target)
        else:
            assert head_of(target).live, calls.where
        finished(source, target)
        shutil.rmtree(target)


def test_names_are_durable_before_the_entry(source: Path, fast_dir: Path) -> None:
    """P46: every name is made durable before the next one is made, and the ledger's first name is the last."""
    calls = WatchedCalls()
    make_fork(source, fast_dir / "durable", calls)
    made = [(i, path) for i, (name, path) in enumerate(calls.log) if name == "link" and "/durable/" in path]
    assert [calls.log[i + 2] for i, _ in made] == [("fsync", str(Path(path).parent)) for _, path in made]
    assert "/ledger/" in made[-1][1]
    assert sum("/ledger/" in path for _, path in made) == 1
