"""Where the epochs of a loop were left: a loop that counts its batches anew in a restored epoch is told.

What makes a loop leave an epoch may be unknown: a function of the program, an exception. But a count shows when it has
made the same number of batches from another place.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

_log = logging.getLogger("ckpt_tasks")
_KEPT = 4  # Epochs: two whole ones, and a restored one between or before them.
_COUNTS_ANEW = (
    "The loop leaves an epoch after %d batches, and an epoch that was restored at batch %d %s: it counts from 0 "
    "again in a restored epoch, and has trained other samples than without a stop. Write `for number, batch in "
    "enumerate(loader, loader.batch):`, and leave the epoch by this number"
)
End = tuple[int, int]  # The number of the first batch of an epoch's last pass, and of the one behind its last.


class Ends:
    """Where the last epochs of one loader have begun and ended; it says nothing of a loop that leaves no epoch."""

    def __init__(self) -> None:
        self.begin = 0
        self._each: list[End] = []
        self._left = self._is_told = False

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

    def state(self) -> dict[str, list[list[int]]]:
        """Return what a checkpoint keeps; nothing for a loop that has left no epoch."""
        return {"ends": [[*end] for end in self._each]} if self._left else {}

    def set(self, ends: Sequence[Sequence[int]]) -> None:
        """Take what a checkpoint has kept."""
        self._each, self._left = [(begin, end) for begin, end in ends], bool(ends)


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
