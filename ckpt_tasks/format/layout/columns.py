"""The columns of an index as arrays of numbers; making one raises one of arrow.FAULTS for an impossible value."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ckpt_tasks.format.layout.arrow import array, numbers_of
from ckpt_tasks.format.layout.image import MAX_DIMENSIONS, MIN_REGION_BYTES, REGION_BYTES

MAX_REGIONS = 1 << 20
MAX_EXTENTS = 8 * MAX_REGIONS  # All regions have at most this many extents together.
_MAX_ELEMENTS = 2.0**57  # A region's limit: its size in bytes fits into an int64 with any dtype.
_HUGE = 2.0**200


def shared_region_bytes(total_bytes: int, tensors: int) -> int:
    """Return the smallest region size in bytes with which all ranks together have at most half of MAX_REGIONS.

    It is never more than REGION_BYTES, also where the regions are then more than that.
    """
    region_bytes = MIN_REGION_BYTES
    while region_bytes < REGION_BYTES and total_bytes // region_bytes + tensors > MAX_REGIONS // 2:
        region_bytes *= 2
    return region_bytes


class Words:
    """A column of few distinct words: the `words`, the index of each word (`code`), and each row's index (`codes`)."""

    def __init__(self, column: pa.DictionaryArray):
        words = column.dictionary.to_pylist()
        if len(words) > len(column):
            raise ValueError("a dictionary with words that no row has")
        self.words = [*dict.fromkeys(words)]  # A hostile dictionary may have a word twice.
        self.code = {word: code for code, word in enumerate(self.words)}
        self.codes = np.array([self.code[word] for word in words], np.int64)[numbers_of(column.indices)]

    @property
    def used(self) -> list[Any]:
        """The words that at least one row has."""
        # np.unique would import numpy.ma, which costs a restore in a new process 9 ms.
        return [self.words[code] for code in np.flatnonzero(np.bincount(self.codes, minlength=len(self.words)))]

    def values(self) -> list[Any]:
        """Return the word of every row."""
        return [self.words[code] for code in self.codes.tolist()]


class Lists:
    """A column of short lists: all `numbers` in one array, with the length and the end of each row's list."""

    def __init__(self, column: pa.ListArray):
        ends = numbers_of(column.offsets)
        flat = column.values[ends[0] : ends[-1]]  # `flatten` would import pyarrow.compute, which takes 140 ms.
        if flat.null_count:
            raise ValueError("a missing number in a list")
        self.numbers: npt.NDArray[np.int64] = numbers_of(flat)
        if self.numbers.min(initial=0) < 0:
            raise ValueError("a negative number in a list")
        self.lengths = np.diff(ends).astype(np.int64)
        self.ends = np.cumsum(self.lengths)
        if len(flat) > MAX_EXTENTS or self.lengths.max(initial=0) > MAX_DIMENSIONS:
            raise ValueError("more dimensions than a tensor has")

    def values(self) -> list[tuple[int, ...]]:
        """Return the list of every row as a tuple."""
        # Convert all rows of one length at once: that takes half the time.
        begins = self.ends - self.lengths
        lists: dict[int, Iterator[tuple[int, ...]]] = {0: repeat(())}
        for length in np.flatnonzero(np.bincount(self.lengths)[1:]) + 1:
            places = begins[self.lengths == length]
            lists[int(length)] = zip(*(self.numbers[places + n].tolist() for n in range(length)), strict=True)
        return [next(lists[length]) for length in self.lengths.tolist()]

    def matrix(self, rows: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Return the lists of some rows as a matrix; all these lists have this length."""
        begins = (self.ends - self.lengths)[rows]
        matrix: npt.NDArray[np.int64] = self.numbers[begins[:, None] + np.arange(length)]
        return matrix

    def some(self, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return a flag for each row: True if `mask`, which has a flag for each number, marks a number in its list."""
        count = np.concatenate(([0], np.cumsum(mask)))
        result: npt.NDArray[np.bool_] = count[self.ends] != count[self.ends - self.lengths]
        return result

    def products(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the product of each list (-1: too large), and the approximate product of its nonzero numbers."""
        product, magnitude = np.ones(len(self.ends), np.int64), np.ones(len(self.ends))
        for n in range(int(self.lengths.max(initial=0))):
            there = self.lengths > n
            factor = self.numbers[(self.ends - self.lengths)[there] + n]
            product[there] *= factor  # The product may overflow.
            magnitude[there] = np.minimum(magnitude[there] * np.maximum(factor, 1), _HUGE)
        product[(magnitude > _MAX_ELEMENTS) & ~self.some(self.numbers == 0)] = -1
        return product, magnitude


def whole_column(column: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    """Return a column as one array; raise ValueError if a value is missing, which Arrow does not check."""
    if column.null_count:
        raise ValueError(f"a value is missing in the column {field.name}")
    if column.num_chunks == 1:
        return column.chunk(0)  # Combining would load Arrow's compute module: 9 ms the first time.
    whole = column.combine_chunks()
    # With zero chunks, combine_chunks returns a ChunkedArray.
    return array([], field.type) if isinstance(whole, pa.ChunkedArray) else whole
