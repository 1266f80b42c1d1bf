"""How long training took, as a run's commits record it: every step counts as long as it took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader
from ckpt_tasks.run.ledger.goodput import follow
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.timeline import read_timeline
from ckpt_tasks.storage.local import LocalStore
from tests.support.systems import Waited, running_on


class Clock(Waited):
    """A machine whose two clocks pass in waits alone."""

    def time(self) -> float:
        return 1e9 + self.waited_s


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that take 10 ms each."""

    def __init__(self, clock: Clock):
        self._clock = clock

    def __len__(self) -> int:
        return 301

    def __getitem__(self, number: int) -> torch.Tensor:
        self._clock.sleep(0.01)
        return torch.zeros(1)


def shares(run_dir: Path) -> dict[str, float]:
    """Return the shares of a run's time."""
    course = follow(read_timeline(History(LocalStore(run_dir))).moments)
    return {name: round(seconds, 6) for name, seconds in course.seconds.items() if seconds > 1e-5}


def test_the_time_of_every_step_counts(run_dir: Path) -> None:
    """Of 300 steps of 50 ms each tenth takes 550 ms, and batches take 10 ms: all of it is in the report's shares.

    The first step also waits for a compiler, which is the start's time; what stands between a save and a wait for it is
    attributed to nothing.
    """
    with running_on(Clock()) as clock:
        loader = ResumableLoader(Slow(clock))
        state = {"weights": torch.zeros(4), "data": loader}
        config = CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=100, memory_dir=None)
        with Checkpointer(config) as ckpt:
            ckpt.restore(state)
            clock.sleep(20)  # A compiler runs.
            for step, _ in enumerate(loader, start=1):
                clock.sleep(0.55 if step % 10 == 0 else 0.05)
                ckpt.step(step, state)
                if step % 100 == 0:  # Else a later snapshot may replace this one.
                    clock.sleep(3)
                    ckpt.wait()
            ckpt.save(301, state)
    first_s = (99 * 0.06 + 10 * 0.5) / 99  # The mean of the 99 steps between it and the first save.
    wanted = {"useful": 30.0 + first_s, "data": 3.0, "starting": 20.06 - first_s, "unattributed": 9.0}
    assert shares(run_dir) == pytest.approx(wanted, abs=1e-4)


def test_what_a_restore_throws_away_is_not_counted_again(run_dir: Path) -> None:
    """Steps between a commit and a restore in the same process are in no later commit; a save alone has its steps."""
    state: dict[str, Any] = {"weights": torch.zeros(4)}
    with running_on(Clock()) as clock:
        config = CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=1000, memory_dir=None)
        with Checkpointer(config) as ckpt:
            ckpt.restore(state)
            for step in (1, 2):
                clock.sleep(1)
                ckpt.step(step, state)
            ckpt.save(2, state)
            for step in (3, 4):
                clock.sleep(1)
                ckpt.step(step, state)
            ckpt.restore(state)
            for step in (3, 4):
                clock.sleep(5)
                ckpt.step(step, state)
            ckpt.save(4, state)
    assert shares(run_dir) == pytest.approx({"useful": 2.0 + 10.0, "unattributed": 2.0}, abs=1e-6)
