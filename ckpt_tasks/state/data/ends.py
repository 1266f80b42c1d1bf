"""Where the epochs and the passes of a loader begin and end.

What makes a loop leave an epoch may be unknown: a function of the program, an exception. But a loop that counts its
batches anew in a restored epoch shows when it has made the same number of batches from another place.

An epoch of the loop may pass over several loaders, one after the other. A restored epoch is entered again from its
begin: the passes that were over at the save must yield nothing then. A loader counts its passes for that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count
from typing import Any

_log = logging.getLogger("ckpt_tasks")
_MOST_PASSES = 64
_KEPT = 4  # Epochs: two whole ones, and a restored one between or before them.
_COUNTS_ANEW = (
    "The loop leaves an epoch after %d batches, and an epoch that was restored at batch %d %s: it counts from 0 "
    "again in a restored epoch, and has trained other samples than without a stop. Write `for number, batch in "
    "enumerate(loader, loader.batch):`, and leave the epoch by this number"
)
moments = count(1)  # Of this process, to compare.
End = tuple[int, int]  # The number of the first batch of an epoch's last pass, and of the one behind its last.


class Ends:
    """Where the last epochs of one loader have begun and ended, and its passes in the loop's epoch.

    `epoch_at`: when the last epoch of its `epochs()` has begun. `empty`: so many passes yield nothing after a restore;
    `goes_on`: the one behind them continues. `over`: what a save notes of both.
    """

    def __init__(self) -> None:
        self.begin = self.epoch_at = self.empty = 0
        self.goes_on = False
        self.over: tuple[int, bool] | None = None
        self._passes_at: list[int] = []
        self._each: list[End] = []
        self._left = self._is_told = False

    def begin_epoch(self) -> None:
        """Note that the loop has begun an epoch."""
        self.epoch_at = next(moments)

    def begin_pass(self) -> None:
        """Note that a pass begins; not for one inside of the training's."""
        self.begin = 0
        self._passes_at = [*self._passes_at[-_MOST_PASSES:], next(moments)]

    def passes(self, epoch_at: int) -> int:
        """Return how many passes have begun since the loop's epoch has."""
        return sum(moment > epoch_at for moment in self._passes_at)

    def add(self, batch: int, *, is_left: bool) -> None:
        """Note where an epoch has ended, and warn once if the loop counts anew."""
        self._left |= is_left
        self._each = [*self._each, (self.begin, batch if is_left else -1)][-_KEPT:]
        anew = None if self._is_told else counted_anew(self._each)
        if anew is not None:
            self._is_told = True
            begin, end = anew[1]
            how = f"after {end - begin} more" if end > 0 else "never"
            _log.warning(_COUNTS_ANEW, anew[0], begin, how)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: nothing for a loop that has left no epoch and has no other loader."""
        ends = {"ends": [[*end] for end in self._each]} if self._left else {}
        return {**ends, "over": [*self.over]} if self.over else ends

    def set(self, ends: Sequence[Sequence[int]], over: Sequence[Any]) -> None:
        """Take what a checkpoint has kept."""
        self._each, self._left = [(begin, end) for begin, end in ends], bool(ends)
        self.empty, self.goes_on = over
        self._passes_at = []


def counted_anew(ends: Sequence[End]) -> tuple[int, End] | None:
    """Return after how many batches a loop leaves an epoch, and the restored one that shows that it counts anew."""
    whole = [end for begin, end in ends if begin == 0 and end > 0]
    for begin, end in ends:
        same = [last - first for first, last in ends if first != begin and last > 0 and last - first == end - begin]
        if begin and end > 0 and same:
            return same[0], (begin, end)
        if begin and len(whole) > 1 and len({*whole}) == 1 and not 0 < end <= whole[0]:
            return whole[0], (begin, end)
    return None
