"""Cells of a notebook that run again: what the name of a Checkpointer was before, and what is shown."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer, Listener, open_run
from ckpt_tasks.errors import ConfigError, OwnedError, StateError
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


def test_a_listener_that_waits_for_its_own_save_is_refused(run_dir: Path) -> None:
    """What would wait for ever raises StateError in the listener and changes nothing; the run goes on."""
    refused: list[str] = []
    with opened(run_dir) as ckpt:
        ckpt.restore(state_at(0))
        calls: dict[str, tuple[object, ...]] = {"save": (9, state_at(9)), "step": (9, state_at(9)), "wait": ()}
        calls |= {"close": (), "restore": (state_at(0),), "pin": (1,)}

        def waits(checkpoint: object) -> None:
            for verb, arguments in calls.items():
                with pytest.raises(StateError, match=r"by the save that it would wait for\. Let it return"):
                    getattr(ckpt, verb)(*arguments)
                refused.append(verb)

        ckpt.listen(Listener(committed=waits))
        for step in (1, 2):
            assert ckpt.save(step, state_at(step)).step == step
    assert refused == 2 * [*calls]
    assert committed(run_dir) == [1, 2]


def test_a_listener_that_exits_ends_no_save(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """sys.exit in a listener is logged as any exception is; a Ctrl-C in one of a restore goes on to the caller."""
    with opened(run_dir) as ckpt:
        ckpt.restore(state_at(0))
        ckpt.listen(Listener(committed=lambda checkpoint: sys.exit(3)))
        assert ckpt.save(1, state_at(1)).step == 1
        assert "SystemExit: 3" in caplog.text
    ckpt = Checkpointer(ckpt.config)
    ckpt.listen(Listener(restored=lambda report: signal.raise_signal(2)))
    with pytest.raises(KeyboardInterrupt):
        ckpt.restore(state_at(0))
    ckpt.close()


def test_wrong_arguments_are_told_what_to_write(run_dir: Path) -> None:
    """A directory where a configuration belongs, and the like, raises ConfigError with the line to write."""
    with opened(run_dir) as ckpt:
        ckpt.save(1, state_at(1))
    wrong: dict[str, Callable[[], object]] = {
        'Write Checkpointer(CheckpointConfig(checkpoint_dir="runs/first"))': lambda: Checkpointer("runs/a"),  # type: ignore[arg-type]
        "Write CheckpointConfig(checkpoint_dir='runs/a')": lambda: CheckpointConfig("runs/a"),  # type: ignore[call-arg]
        "The place of a configuration is config.location": lambda: open_run(ckpt.config),  # type: ignore[arg-type]
        'Write run.restore(run.find("latest"), state)': lambda: ckpt.run.restore(state_at(0), state_at(0)),  # type: ignore[arg-type]
        "Write listen(Listener(committed=function))": lambda: ckpt.listen(print),  # type: ignore[arg-type]
        "Hand its config to the other process": lambda: pickle.dumps(ckpt),
        "neither copied nor pickled": lambda: copy.deepcopy({"ckpt": ckpt}),
    }
    for text, call in wrong.items():
        with pytest.raises(ConfigError, match=re.escape(text)):
            call()


def test_a_save_returns_its_own_checkpoint(run_dir: Path) -> None:
    """Where two threads save at once, each gets the checkpoint of its own step, or is refused."""
    mine: list[bool] = []

    def save_all(ckpt: Checkpointer) -> None:
        for step in range(1, 10):
            with suppress(StateError):  # the other one was faster
                mine.append(ckpt.save(step, {"x": step}).step == step)

    with opened(run_dir) as ckpt:
        threads = [threading.Thread(target=save_all, args=(ckpt,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(mine)
    assert len(mine) >= 9
