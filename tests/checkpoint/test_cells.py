"""Cells of a notebook that run again: what the name of a Checkpointer was before, and what is shown."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import OwnedError, StateError
from tests.support.pipelines import Gate, committed, gate, opened, state_at

__all__ = ["gate"]


def test_a_cell_that_runs_again_continues_from_the_save_under_way(
    run_dir: Path, fast_dir: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """A Checkpointer whose name gets another one was not closed; its save under way is committed and restored."""
    ckpt = opened(run_dir, gate, memory_dir=str(fast_dir))
    ckpt.restore(state_at(0))
    ckpt.step(1, state_at(1))
    assert gate.reached.wait(30)
    threading.Timer(0.1, gate.opened.set).start()
    ckpt = opened(run_dir, memory_dir=str(fast_dir))
    with caplog.at_level(logging.WARNING, "ckpt_tasks"), ckpt:
        assert ckpt.restore(state := state_at(0)) == 1
    assert state["step"] == 1
    assert committed(run_dir) == [1]
    assert caplog.text == ""


def test_the_last_traceback_holds_a_checkpointer(run_dir: Path) -> None:
    """After an error within it no name may hold it, but the traceback does: the refusal says so, and what to do."""
    ckpt = opened(run_dir)
    ckpt.restore(state_at(0))
    with pytest.raises(StateError) as last:
        ckpt.step(-1, state_at(1))
    ckpt = opened(run_dir)
    with pytest.raises(OwnedError, match=r"a notebook keeps the one .* the last traceback"):
        ckpt.restore(state_at(0))
    with Checkpointer(ckpt.config, take_over=True) as ckpt:
        assert ckpt.restore(state_at(0)) == 0
    assert last.tb is not None
