"""The main job's program, which also writes down which samples every step saw, and slows down so that kills hit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from ckpt_tasks.flows.programs.byte_lm import ByteLM


class Recording(ByteLM):
    """Append "index id id …" to `log` at every step; pause `pause_s` a step; die by SIGKILL in step `kill_at`, once."""

    def __init__(self, *, log: str, pause_s: float = 0.0, kill_at: int | None = None, **params: Any):
        super().__init__(**params)
        self._log, self._pause_s, self._kill_at = Path(log), pause_s, kill_at

    def train_step(self) -> dict[str, float]:
        """Train one step, then write down what it saw: the index of the step in all of training, and the ids."""
        whole = self.sampler.size // self.sampler.batch_size
        index = self.sampler.epoch * whole + self.sampler.samples // self.sampler.batch_size
        ids = next(iter(self.sampler), None) or []
        if index + 1 == self._kill_at and not self._log.with_suffix(".killed").exists():
            self._log.with_suffix(".killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        metrics = super().train_step()
        with self._log.open("a") as file:
            file.write(f"{index} {' '.join(map(str, ids))}\n")
        time.sleep(self._pause_s)
        return metrics


def committed(log: Path) -> list[tuple[int, ...]]:
    """Return the ids of every step that is part of the run, in order: what was trained again replaces what was lost."""
    steps: list[tuple[int, ...]] = []
    for line in log.read_text().splitlines():
        index, *ids = map(int, line.split())
        assert index <= len(steps), f"step {index} was trained after {len(steps)} steps: a gap"
        del steps[index:]
        steps.append(tuple(ids))
    return steps
