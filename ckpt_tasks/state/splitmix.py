"""SplitMix64 (Steele, Lea, Flood 2014), by which orders of samples and places of rows follow from numbers alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def finalised(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of 64-bit numbers, one to one."""
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


def mixed(numbers: NDArray[Any]) -> NDArray[np.uint64]:
    """Hash 64-bit numbers, with equal results on every machine and in every version."""
    return finalised(numbers.astype(np.int64).view(np.uint64) + _GOLDEN)
