"""Saves by interval, and interim ones, which only end a batch or a process: which stay, and what is not saved."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.flows.session.local_session import StateSession
from ckpt_tasks.testing import elapse


def state(value: float = 0.0) -> dict[str, Any]:
    return {"weights": torch.full((4,), value)}


def opened(directory: Path, **options: Any) -> Checkpointer:
    return Checkpointer(CheckpointConfig(checkpoint_dir=directory, memory_dir=None, **options))


def live(directory: Path) -> dict[int, bool]:
    """Return step → interim of the live checkpoints, oldest commit first."""
    return {one.step: one.interim for one in reversed(open_run(directory).checkpoints())}


def train_in_batches(session: StateSession, total: int, batch: int) -> None:
    ckpt = session.ckpt
    for step in range(ckpt.position + 1, total + 1):
        ckpt.step(step, session.state)
        if step % batch == 0 or step == total:
            session.save(step)


@pytest.mark.parametrize(
    ("saves", "last", "batch", "expected"),
    [
        ({"step_interval": 20}, 77, 7, {20: False, 40: False, 60: False, 77: True}),
        ({"step_interval": 100}, 35, 7, {0: False, 28: True, 35: True}),
        ({"step_interval": 5, "max_num_checkpoints": None}, 10, 5, {0: False, 5: False, 10: False}),
    ],
    ids=["many of the interval", "none of it yet", "batches that end on it"],
)
def test_batch_ends_stay_beside_the_interval(
    run_dir: Path, saves: dict[str, Any], last: int, batch: int, expected: dict[int, bool]
) -> None:
    """The newest of the interval stay beside the last batch; before there are any, batch ends stay in their place.

    Where a save was due at the last step of a batch, the batch's end adds nothing, and it counts.
    """
    with opened(run_dir, **saves) as ckpt:
        session = StateSession(ckpt, state())
        session.restore()
        train_in_batches(session, last, batch)
    assert live(run_dir) == expected


def test_a_batch_end_does_not_move_the_interval(run_dir: Path) -> None:
    """The next save by seconds comes when it would have come without the save that ended a batch."""
    with opened(run_dir, save_interval_secs=3600.0) as ckpt:
        session = StateSession(ckpt, state())
        session.restore()
        elapse(ckpt, 3590.0)
        ckpt.step(1, session.state)
        session.save(1)
        elapse(ckpt, 20.0)
        assert ckpt.step(2, session.state)
    assert live(run_dir) == {0: False, 1: True, 2: False}


def test_a_preempted_step_is_interim(run_dir: Path) -> None:
    """P69: what SIGTERM saves between two saves by interval does not push one of them out."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with opened(run_dir, step_interval=2, max_num_checkpoints=2) as ckpt:
            for step in range(1, 6):
                if step == 5:
                    ckpt.wait()  # else the newer snapshot takes the place of one that waits
                    os.kill(os.getpid(), signal.SIGTERM)
                ckpt.step(step, state(float(step)))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert live(run_dir) == {2: False, 4: False, 5: True}


def test_the_end_of_a_loop_says_what_is_not_saved(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P72: a block that ends well after steps without a save names them; one that ends with a save says nothing."""
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        with opened(run_dir, step_interval=10) as ckpt:
            for step in range(1, 14):
                ckpt.step(step, state(float(step)))
        assert [record.getMessage() for record in caplog.records] == [
            "Steps 11 to 13 are not saved: no save was due. Call save(step, state) after the last step."
        ]
        caplog.clear()
        with opened(run_dir, step_interval=10) as ckpt:
            target = state()
            ckpt.restore(target)
            ckpt.step(11, target)
            ckpt.save(11, target)
        assert caplog.records == []
