"""The order of an epoch, which gives the sample at any position directly. This module does not import torch."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from ckpt_tasks.state.splitmix import finalised

ORDER_VERSION = 1  # Raise it with any change to Permutation, so that a resume notices the change.
_ROUNDS = 12


class Permutation:
    """A permutation of range(size) that `key` chooses; each position takes O(1) time and memory.

    A balanced Feistel network (Luby and Rackoff, 1988) over the fewest bits, in two equal halves, that hold `size`; a
    result outside the range is mapped again until it is inside (cycle walking: Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002), fewer than four times on average. The round function is the finaliser of
    SplitMix64 (Steele, Lea and Flood, 2014). Feistel networks as a shuffle: Mitchell, Stokes, Frank and Holmes,
    "Bandwidth-Optimal Random Shuffling for GPUs", 2022. It is for data order, not for secrets.
    """

    def __init__(self, size: int, key: str):
        self.size = size
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_bits, self._low_bits = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
        self._round_keys = np.frombuffer(hashlib.shake_256(key.encode()).digest(8 * _ROUNDS), dtype="<u8")

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the element at each position; both are int64 in range(size), of shape (n,)."""
        values = self._map(positions.astype(np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._map(values[outside])
        return values.astype(np.int64)

    def _map(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._low_bits
        for key in self._round_keys:
            left, right = right, left ^ (finalised(right ^ key) & self._low_bits)
        return (left << self._half_bits) | right
