"""Where the row of each id is: a hash table in one array, which looks up a whole batch at once.

Open addressing with linear probing (Knuth, The Art of Computer Programming, 6.4, Algorithm L). A slot has the index of
a row, and the row's id is compared. Each round looks at one more slot for every id that is not settled, so that a batch
takes a few calls of NumPy: a dict takes one call, and a hundred bytes, for each id.
"""

from __future__ import annotations

import numpy as np

from ckpt_tasks.state.splitmix import mixed
from ckpt_tasks.state.tables.table_rows import Ids

_EMPTY, _DELETED = -1, -2


class RowIndex:
    """The row index of each id; `held` in its methods are the ids of all rows, by row index.

    It begins with `2 ** fewest_bits` slots.
    """

    def __init__(self, fewest_bits: int = 10) -> None:
        self.count = 0
        self._fewest_bits = fewest_bits
        self._make(fewest_bits)

    def _make(self, bits: int) -> None:
        self._slots = np.full(1 << bits, _EMPTY, np.int64)
        self._shift, self._last = np.uint64(64 - bits), (1 << bits) - 1
        self._filled = 0  # Slots that are not empty, at most half of all: so a search ends, and soon.

    @property
    def places(self) -> Ids:
        """The row indices of all ids, sorted."""
        return np.sort(self._slots[self._slots >= 0])

    def find(self, ids: Ids, held: Ids) -> Ids:
        """Return the row index of each id; -1 for an id without a row."""
        return self._search(ids, held)[1]

    def add(self, ids: Ids, places: Ids, held: Ids) -> None:
        """Add distinct ids that have no row yet, with their row indices."""
        if 2 * (self._filled + len(ids)) > len(self._slots):
            kept = self.places
            self._make(max(self._fewest_bits, (2 * (len(kept) + len(ids))).bit_length()))
            self._insert(held[kept], kept)
        self._insert(ids, places)
        self.count += len(ids)

    def remove(self, ids: Ids, held: Ids) -> Ids:
        """Remove distinct ids; return the row index of each, -1 for an id without a row."""
        slots, places = self._search(ids, held)
        self._slots[slots[places >= 0]] = _DELETED
        self.count -= int(np.count_nonzero(places >= 0))
        return places

    def _search(self, ids: Ids, held: Ids) -> tuple[Ids, Ids]:
        """Return the slot at which the search for each id ends, and what is in it."""
        slots = self._first(ids)
        places = self._slots[slots]
        if not self.count:
            return slots, np.full_like(places, _EMPTY)
        left = np.flatnonzero((places != _EMPTY) & ((places == _DELETED) | (held[places] != ids)))
        while len(left):
            slots[left] = (slots[left] + 1) & self._last
            found = places[left] = self._slots[slots[left]]
            left = left[(found != _EMPTY) & ((found == _DELETED) | (held[found] != ids[left]))]
        return slots, places

    def _insert(self, ids: Ids, places: Ids) -> None:
        self._filled += len(ids)
        slots = self._first(ids)
        while len(slots):
            free = self._slots[slots] < 0
            self._slots[slots[free]] = places[free]  # Of several ids at one slot the last one gets it.
            left = self._slots[slots] != places
            slots, places = (slots[left] + 1) & self._last, places[left]

    def _first(self, ids: Ids) -> Ids:
        """Return the slot at which the search for each id begins.

        It is the hash's upper bits: the lower ones choose the rank, and are alike in all ids of one.
        """
        return (mixed(ids) >> self._shift).astype(np.int64)
