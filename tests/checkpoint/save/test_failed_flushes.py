"""Saves that fail in the background of training: training is told and does not wait, and all failures are recorded."""

from __future__ import annotations

import errno
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
from tests.support.pipelines import committed, give_calls, opened, restored, state_at


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


class Watched(FailingCalls):
    """Let the first write of a checkpoint's objects fail, and write down what the thread that trains calls then."""

    trainer: tuple[str, ...] = ()

    def do(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        if self.reached and threading.current_thread() is threading.main_thread():
            self.trainer += (f"{name} {path}",)
        return super().do(name, path, call)


def test_a_failed_flush_warns_where_that_is_asked_for(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P28, P43: with on_flush_failure="warn" training goes on and never asks the store that failed: a note follows."""
    with opened(run_dir, on_flush_failure="warn") as ckpt:
        ckpt.save(1, state_at(1))
        give_calls(ckpt, calls := Watched(1, "refused", below="/checkpoint_"))
        ckpt.step(2, state_at(2))
        _until_raised(ckpt)
        assert calls.reached
        assert calls.trainer == ()
    assert re.search(r"training continues: .*\(step 2, at ", caplog.text)
    assert committed(run_dir) == [1, 3]
    assert [(note["note"], note["step"]) for note in open_run(str(run_dir)).notes()] == [("flush_failed", 2)]
