"""Who takes a run directory: restore, save and acquire, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_tasks import Checkpointer, open_run
from ckpt_tasks.errors import FencedError, OwnedError, StateError
from ckpt_tasks.testing import die
from tests.support.places import LocalPlace
from tests.support.runs import opened, state_of, train


@pytest.mark.parametrize("verb", ["pin", "unpin", "note", "record_failure", "record_program", "prune"])
def test_what_only_an_owner_may_do_takes_nothing(run_dir: Path, verb: str) -> None:
    """Without the run directory each of these raises StateError, says how to take it, and writes nothing."""
    train(run_dir, 1)
    before = LocalPlace(run_dir).everything()
    with opened(run_dir) as ckpt:
        arguments = {"pin": (1,), "unpin": (1,), "note": ("mine",), "record_program": ("m:P", {})}.get(verb, ())
        with pytest.raises(StateError, match=r"does not hold the run directory.*acquire\(\) first"):
            getattr(ckpt, verb)(*arguments)
        assert LocalPlace(run_dir).everything() == before
        ckpt.acquire()
        getattr(ckpt, verb)(*arguments)
    assert LocalPlace(run_dir).everything() != before


def test_acquire_takes_the_run_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`acquire` makes this process the owner once, and is refused while another holds it; a lone rank is told why."""
    train(run_dir, 1)
    epoch = open_run(run_dir).head().state.owner.epoch  # type: ignore[union-attr]
    with opened(run_dir) as ckpt:
        ckpt.acquire()
        ckpt.acquire()
        owner = open_run(run_dir).head().state.owner
        assert owner is not None
        assert owner.epoch == epoch + 1
        with pytest.raises(OwnedError):
            Checkpointer(ckpt.config).acquire()
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(OwnedError, match=r"rank 1 of 2, .* call init_process_group\(\) before Checkpointer"):
            Checkpointer(ckpt.config).acquire()
        assert ckpt.restore(state_of(0)) == 1
    assert open_run(run_dir).head().state.owner.released  # type: ignore[union-attr]


def test_a_directory_that_is_renamed_under_a_run(run_dir: Path) -> None:
    """The next save says so and writes nothing at the old place; where the run is now, it goes on."""
    with opened(run_dir) as ckpt:
        ckpt.save(1, state_of(1))
        moved = run_dir.rename(run_dir.with_name("moved"))
        with pytest.raises(FencedError, match="it was moved"):
            ckpt.save(2, state_of(2))
    assert not run_dir.exists()
    with opened(moved, take_over=True) as ckpt:
        assert ckpt.restore(state_of(0)) == 1
        ckpt.save(2, state_of(2))


@pytest.mark.parametrize("leave", [Checkpointer.close, die])
def test_who_has_left_a_run_writes_nothing_into_it(run_dir: Path, leave: Callable[[Checkpointer], None]) -> None:
    """No thread is left of a Checkpointer that is closed, or has died within its process: nothing comes afterwards."""
    before = {*threading.enumerate()}
    ckpt = opened(run_dir)
    for step in (1, 2):
        ckpt.save(step, state_of(step), metrics={"loss": 1.0})
    threads = {*threading.enumerate()} - before
    assert {"ckpt-heartbeat", "ckpt-live"} <= {thread.name for thread in threads}
    leave(ckpt)
    assert [thread.name for thread in threads if thread.is_alive()] == []
