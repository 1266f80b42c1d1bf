"""Where training stands: the steps completed, the last save, and how fast it steps without its saves."""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from ckpt_tasks.policy.cadence import SavePoint

__all__ = ["Position", "point"]

_STEPS = 20


class Position:
    """Follow one training by what its Checkpointer sees.

    `step` counts the steps completed, as restored or reported last; `saved_step` is the newest step that was restored
    or snapshot; `last` is where the intervals between saves count from.
    """

    def __init__(self) -> None:
        self.restored(0, None)
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._since: SavePoint | None = None  # where the step under way began

    @property
    def step_s(self) -> float | None:
        """The median seconds of the last 20 steps; None before the second one."""
        return median(self._seconds) if self._seconds else None

    @property
    def unsaved(self) -> str:
        """The steps since the last save, as "11 to 13"; "" where there are none.

        Nothing saves them at the end of a block: the state may have changed since step() saw it (an evaluation, a batch
        that was fetched), so that only the program can say whether it still is that of the last step.
        """
        return f"{self.saved_step + 1} to {self.step}" if self.step > self.saved_step else ""

    def restored(self, step: int, epoch: int | None) -> None:
        """Go on from a checkpoint, or from the beginning."""
        self.step = self.saved_step = step
        self.last = point(step, epoch)

    def stepped(self, now: SavePoint) -> None:
        """Note a completed step."""
        self.step = now.step
        if self._since is not None and now.step > self._since.step:
            self._seconds.append((now.clock_s - self._since.clock_s) / (now.step - self._since.step))
        self._since = now

    def saved(self, step: int, epoch: int | None, *, interim: bool) -> None:
        """Note a save; an interim one does not move the intervals."""
        self.step = self.saved_step = step
        self._since = point(step, epoch)
        if not interim:
            self.last = self._since


def point(step: int, epoch: int | None) -> SavePoint:
    """Return a point of training as of now."""
    return SavePoint(step=step, epoch=epoch, clock_s=time.monotonic())
