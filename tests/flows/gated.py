"""A program that stops at a chosen place and waits there, so that a test can act on its process at that moment."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckpt_tasks.checkpoint.interrupt import held_back
from ckpt_tasks.flows.train import train
from tests.support.tiny import Tiny

__all__ = ["TIMEOUT_S", "Gated", "GatedPair", "delayed", "retried", "timed"]

TIMEOUT_S = 30.0
timed = train.with_options(timeout_seconds=TIMEOUT_S)
retried = train.with_options(retries=3)
delayed = train.with_options(retries=3, retry_delay_seconds=600)


class Gated(Tiny):
    """Wait for the file "go" in the `place` "build", or at step `at` in the `place` "step" or "save";
    in the place "again" it raises at that step first, and waits there in the next attempt.

    `folder` holds the files: "at" is made when the process is there, "alarm" when the flow's timeout comes meanwhile,
    and every completed step is a line of "steps". In the places "retry" and "delay" the step raises instead, twice or
    once: the process waits in the delay before the second retry of the task, or before the flow's.
    """

    def __init__(self, *, folder: str, place: str, at: int = 3):
        super().__init__()
        self._folder, self._place, self._at, self._rank = Path(folder), place, at, 0
        self.state["gate"] = _Gate(self)
        if place == "build":
            self.stop()

    def train_step(self) -> dict[str, float]:
        metrics = super().train_step()
        if self._rank:
            return metrics
        with (self._folder / "steps").open("a") as steps:
            steps.write(f"{int(self.state['steps'])}\n")
        return metrics

    @property
    def saves(self) -> bool:
        """Whether this is the save to stop in."""
        return self._place == "save" and int(self.state["steps"]) == self._at

    def stop(self) -> None:
        """Say that the process is here, and wait until it may go on."""
        (self._folder / "at").touch()
        left_s = signal.getitimer(signal.ITIMER_REAL)[0]
        while not (self._folder / "go").exists():
            time.sleep(0.02)
            before_s, left_s = left_s, signal.getitimer(signal.ITIMER_REAL)[0]
            if left_s > before_s or (self._rank and held_back()):
                (self._folder / "alarm").touch()

    def _interfere(self, step: int) -> None:
        if step == self._at and self._place == "step":
            self.stop()
        if step == self._at and self._place == "again" and (self._folder / "failed").exists():
            self.stop()
        failed = [self._folder / name for name in ("failed", "failed again")[: 1 + (self._place == "retry")]]
        left = [one for one in failed if not one.exists()]
        if step == self._at and self._place in ("retry", "delay", "again") and left:
            left[0].touch()
            raise RuntimeError(f"injected in step {step}")


class GatedPair(Gated):
    """The same on two ranks, in the place "rank": rank 1 waits in step `at`, and rank 0 for it."""

    def __init__(self, *, folder: str, place: str, at: int = 3):
        super().__init__(folder=folder, place=place, at=at)
        self.model = DistributedDataParallel(self.model)
        self.state["model"] = self.model
        self._rank = dist.get_rank()
        torch.manual_seed(self._rank)

    def _interfere(self, step: int) -> None:
        if step == self._at and self._rank == 1:
            self.stop()


class _Gate:
    """Take part in every save, and stop in that of the chosen step."""

    def __init__(self, program: Gated):
        self._program = program

    def state_dict(self) -> dict[str, Any]:
        if self._program.saves:
            self._program.stop()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing was saved."""
