"""Detect a spike of a loss: a pure rule over the losses of the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

WINDOW = 100
STREAK = 3  # One bad batch is no spike.
# This is 6.7 standard deviations if the losses of the window are normally distributed.
FACTOR = 10.0
SEEN = WINDOW + STREAK


def is_spike(losses: Sequence[float]) -> bool:
    """Return True if each of the last 3 losses is far above the 100 before them.

    "Far above" means above the median of the 100 by more than 10 times their median absolute deviation. Returns False
    for fewer than 103 losses, and if most of the 100 are equal, since then their variation is unknown.
    """
    if len(losses) < SEEN:
        return False
    before = losses[-SEEN:-STREAK]
    usual = median(before)
    spread = median([abs(loss - usual) for loss in before])
    return spread > 0 and min(losses[-STREAK:]) > usual + FACTOR * spread
