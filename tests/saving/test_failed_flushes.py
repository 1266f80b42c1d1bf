"""Saves that fail in the background of training: training is told and does not wait, and all failures are recorded."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import Checkpointer, open_run
from ckpt_tasks.errors import StoreError
from ckpt_tasks.testing import settle
from tests.support.calls import FailingCalls
from tests.support.pipelines import Gate, Refusing, committed, give_calls, opened, restored, state_at


@pytest.mark.parametrize("n", [1, 3, 6])
def test_a_failed_flush_is_raised_by_the_next_step(run_dir: Path, n: int) -> None:
    """P28: a writer that fails in the background commits nothing, is raised at the next step, and the old one stays."""
    with opened(run_dir) as ckpt:
        ckpt.save(1, state_at(1))
        give_calls(ckpt, FailingCalls(n, "refused", error=errno.EIO, below="/checkpoint_"))
        ckpt.step(2, state_at(2))
        with pytest.raises(StoreError):
            _until_raised(ckpt)
        assert committed(run_dir) == [1]
        ckpt.save(4, state_at(4))
    assert committed(run_dir) == [1, 4]
    assert restored(run_dir)["step"] == 4


def _until_raised(ckpt: Checkpointer) -> None:
    settle(ckpt)
    ckpt.step(3, state_at(3))


def test_a_failed_flush_warns_where_that_is_asked_for(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P28: with on_flush_failure="warn" training goes on, a note stands in the ledger, and the next save counts."""
    with opened(run_dir, on_flush_failure="warn") as ckpt, caplog.at_level(logging.WARNING, "ckpt_tasks"):
        ckpt.save(1, state_at(1))
        give_calls(ckpt, FailingCalls(2, "refused", below="/checkpoint_"))
        ckpt.step(2, state_at(2))
        _until_raised(ckpt)
    assert re.search(r"training goes on: .*\(step 2, at ", caplog.text)
    assert committed(run_dir) == [1, 3]
    assert [(note["note"], note["step"]) for note in open_run(str(run_dir)).notes()] == [("flush_failed", 2)]


class Watched(FailingCalls):
    """Let the first write of a checkpoint's objects fail, and write down what the thread that trains calls then."""

    trainer: tuple[str, ...] = ()

    def do(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        if self.reached and threading.current_thread() is threading.main_thread():
            self.trainer += (f"{name} {path}",)
        return super().do(name, path, call)


def test_a_store_that_fails_is_not_asked_by_the_thread_that_trains(run_dir: Path) -> None:
    """P43: with on_flush_failure="warn" nobody who trains waits for a store that has failed: the note comes later."""
    with opened(run_dir, on_flush_failure="warn") as ckpt:
        ckpt.save(1, state_at(1))
        give_calls(ckpt, calls := Watched(1, "refused", below="/checkpoint_"))
        ckpt.step(2, state_at(2))
        _until_raised(ckpt)
        assert calls.reached
        assert calls.trainer == ()
    assert [note["step"] for note in open_run(str(run_dir)).notes()] == [2]


def test_of_very_many_failed_saves_the_newest_are_noted(run_dir: Path) -> None:
    """A store that was away for long is not kept busy with notes: the newest sixteen stand in the history."""
    with opened(run_dir, on_flush_failure="warn") as ckpt:
        ckpt.save(1, state_at(1))
        settle(ckpt)  # it would note what fails meanwhile
        give_calls(ckpt, Refusing())
        for step in range(2, 22):
            ckpt.step(step, state_at(step))
            settle(ckpt)
        give_calls(ckpt, os)
        ckpt.save(22, state_at(22))
    assert [note["step"] for note in open_run(str(run_dir)).notes()] == [*range(21, 5, -1)]


class RefusedCommit(Gate):
    """A gate behind which one commit is let through, and further ones are refused until `refusing` is False."""

    refusing = False

    def do(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        commits = name == "link" and "/ledger" in path and self.reached.is_set()
        if commits and self.refusing:
            raise OSError(errno.ENOSPC, "no room, on purpose")
        result = super().do(name, path, call)
        self.refusing = self.refusing or commits
        return result


def test_what_was_dropped_is_recorded_by_the_first_commit_that_lands(run_dir: Path) -> None:
    """P44: a commit that fails does not take the record of what was dropped with it."""
    gate = RefusedCommit()
    with opened(run_dir, gate, on_flush_failure="warn") as ckpt:
        ckpt.step(1, state_at(1))
        assert gate.reached.wait(30)
        for step in (2, 3):
            ckpt.step(step, state_at(step))
        gate.opened.set()
        settle(ckpt)
        assert committed(run_dir) == [1]
        gate.refusing = False
        ckpt.save(4, state_at(4))
    assert committed(run_dir) == [1, 4]
    run = open_run(str(run_dir))
    events = [run.history.read_entry(n)[0].event for n in range(run.head().next_n)]
    assert [event["superseded"] for event in events if "superseded" in event] == [[2]]
