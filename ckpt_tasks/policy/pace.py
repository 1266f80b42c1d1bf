"""How fast training steps, without its saves: what a recommended save interval is measured in."""

from __future__ import annotations

from collections import deque
from statistics import median

from ckpt_tasks.policy.cadence import SavePoint

__all__ = ["Pace"]

_STEPS = 20


class Pace:
    """Keep the seconds of the last 20 steps."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._since: SavePoint | None = None

    @property
    def step_s(self) -> float | None:
        """The median seconds of a step; None before the second one."""
        return median(self._seconds) if self._seconds else None

    def stepped(self, now: SavePoint) -> None:
        """Note a completed step."""
        if self._since is not None and now.step > self._since.step:
            self._seconds.append((now.clock_s - self._since.clock_s) / (now.step - self._since.step))
        self._since = now

    def saved(self, now: SavePoint) -> None:
        """Begin to count again after a save."""
        self._since = now
