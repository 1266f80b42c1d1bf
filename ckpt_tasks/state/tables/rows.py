"""The rows of one rank's part of a lookup table, in arrays that grow, with marks on rows that no file has yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tasks.state.splitmix import mixed
from ckpt_tasks.state.tables.row_index import RowIndex
from ckpt_tasks.state.tables.table_rows import Floats, Ids, TableRows

_FEWEST = 1024  # The arrays first have room for this many rows, and double when full.


def new_rows(ids: Ids, dim: int, seed: int, spread: float) -> Floats:
    """Make the first rows of ids, uniform within ±`spread`; each number depends only on id, column and seed."""
    keys = mixed(mixed(ids).view(np.int64) ^ np.int64(seed))
    columns = mixed(np.arange(dim, dtype=np.int64))
    bits = mixed((keys[:, None] ^ columns[None, :]).view(np.int64))
    unit = (bits >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1
    return (spread * unit).astype(np.float32)


class RowStore:
    """The rows and slots of a table, by id.

    `values` has an array of the rows, then one of each slot. `touched` marks rows that changed after the last file was
    made, and `gone` has ids that were deleted after it.
    """

    def __init__(self, dim: int, slots: int) -> None:
        self.ids = np.empty(0, np.int64)
        self.values = [np.empty((0, dim), np.float32) for _ in range(1 + slots)]
        self.steps = np.empty(0, np.int64)
        self.touched = np.empty(0, np.bool_)
        self.gone: dict[int, None] = {}
        self._index = RowIndex()
        self._free: list[int] = []
        self._end = 0  # The index of the first row that was never used.

    @classmethod
    def of(cls, parts: Sequence[TableRows], dim: int, slots: int) -> RowStore:
        """Join parts without common ids; mark no row as changed."""
        store = cls(dim, slots)
        store._grow(sum(len(part.ids) for part in parts))
        for part in parts:
            begin, end = store._end, store._end + len(part.ids)
            store._put(np.arange(begin, end), part)
            store._index.add(part.ids, np.arange(begin, end), store.ids)
            store._end = end
        return store

    @property
    def count(self) -> int:
        """The number of ids that have a row."""
        return self._index.count

    @property
    def changed(self) -> int:
        """The number of rows that the next file must have."""
        return int(np.count_nonzero(self.touched)) + len(self.gone)

    @property
    def used(self) -> Ids:
        """The indices of all rows in use, sorted."""
        return self._index.places

    def find(self, ids: Ids) -> Ids:
        """Return the row index of each id; -1 for an id without a row."""
        return self._index.find(ids, self.ids)

    def add(self, ids: Ids, rows: Floats) -> Ids:
        """Add distinct new ids with these rows and empty slots; return their row indices."""
        reused = [self._free.pop() for _ in range(min(len(self._free), len(ids)))]
        fresh = len(ids) - len(reused)
        self._grow(self._end + fresh)
        places = np.array([*reused, *range(self._end, self._end + fresh)], np.int64)
        self._end += fresh
        zeros = [np.zeros_like(rows) for _ in self.values[1:]]
        self._put(places, TableRows(ids, (rows, *zeros), np.zeros(len(ids), np.int64), np.empty(0, np.bool_)))
        self.touched[places] = True
        self._index.add(ids, places, self.ids)
        for one in ids.tolist() if self.gone else ():
            self.gone.pop(one, None)
        return places

    def delete(self, ids: Iterable[int]) -> int:
        """Delete ids; return how many had a row."""
        asked = np.fromiter(dict.fromkeys(ids), np.int64)
        places = self._index.remove(asked, self.ids)
        known = places >= 0
        self.touched[places[known]] = False
        self.gone.update(dict.fromkeys(asked[known].tolist()))
        self._free += places[known].tolist()
        return int(np.count_nonzero(known))

    def all(self) -> TableRows:
        """Copy all rows of the table."""
        return self._copy(self.used, ())

    def delta(self) -> TableRows:
        """Copy the rows that have changed since the last file, and the deleted ids."""
        return self._copy(np.flatnonzero(self.touched), self.gone)

    def bytes_by_id(self) -> bytes:
        """Return all rows as bytes in the order of the ids: tables with equal rows return equal bytes."""
        rows = self.all()
        order = np.argsort(rows.ids)
        columns: list[npt.NDArray[Any]] = [rows.ids, *rows.values, rows.steps]
        return b"".join(one[order].tobytes() for one in columns)

    def written(self) -> None:
        """Record that a file has all changes so far."""
        self.touched[:] = False
        self.gone.clear()

    def _copy(self, places: Ids, gone: Iterable[int]) -> TableRows:
        lost = np.fromiter(gone, np.int64)
        count = len(places) + len(lost)
        ids, steps, deleted = np.empty(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.bool_)
        ids[: len(places)], steps[: len(places)] = self.ids[places], self.steps[places]
        ids[len(places) :], deleted[len(places) :] = lost, True
        values = []
        for one in self.values:
            copy = np.empty((count, one.shape[1]), np.float32)
            np.take(one, places, axis=0, out=copy[: len(places)], mode="clip")  # "clip" avoids a buffer.
            copy[len(places) :] = 0
            values.append(copy)
        return TableRows(ids, tuple(values), steps, deleted)

    def _put(self, places: Ids, rows: TableRows) -> None:
        self.ids[places], self.steps[places] = rows.ids, rows.steps
        for into, values in zip(self.values, rows.values, strict=True):
            into[places] = values

    def _grow(self, count: int) -> None:
        room = len(self.ids)
        if count <= room:
            return
        room = max(count, 2 * room, _FEWEST)
        self.ids, self.steps, self.touched = (_longer(one, room) for one in (self.ids, self.steps, self.touched))
        self.values = [_longer(one, room) for one in self.values]


def _longer(values: npt.NDArray[Any], room: int) -> npt.NDArray[Any]:
    longer = np.zeros((room, *values.shape[1:]), values.dtype)
    longer[: len(values)] = values
    return longer
