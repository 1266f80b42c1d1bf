"""When to save: a pure decision from the steps, epochs and seconds since the last save."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SavePoint", "SavePolicy"]


@dataclass(frozen=True, kw_only=True)
class SavePoint:
    """A point in training: steps completed, epochs completed, and a monotonic clock in seconds."""

    step: int
    epoch: int | None
    clock_s: float


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    """Save every so many steps, epochs or seconds, whichever comes first; None switches a rule off."""

    step_interval: int | None = None
    epoch_interval: int | None = None
    save_interval_secs: float | None = None

    def due(self, last: SavePoint, now: SavePoint) -> bool:
        """Say whether a save is due, given the last one (or where training began).

        Steps and epochs count from 0, not from the last save, so that a resumed run saves at the same steps as an
        uninterrupted one; a step reported in larger strides is due when it crosses a multiple.
        """
        if now.step <= last.step:
            return False
        crossed = self.step_interval is not None and now.step // self.step_interval > last.step // self.step_interval
        if crossed:
            return True
        if self.epoch_interval is not None and now.epoch is not None:
            before = (last.epoch if last.epoch is not None else 0) // self.epoch_interval
            if now.epoch // self.epoch_interval > before:
                return True
        return self.save_interval_secs is not None and now.clock_s - last.clock_s >= self.save_interval_secs
