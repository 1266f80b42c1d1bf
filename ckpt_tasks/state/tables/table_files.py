"""The files of one rank's part of a table: a base with all rows, and deltas with rows that changed later.

Invariants

1. A file never changes. Numbers grow along the chain, also with a new base, so that no name is used again.
2. A file's rows stay in memory until a checkpoint with the file is committed. So a save that fails, or that a newer
   save replaces, loses nothing: the next save also writes the file.
3. A chain continues only after a checkpoint that is known to have all files of the chain; otherwise a new base begins a
   new chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from ckpt_tasks.state.tables.rows import RowStore
from ckpt_tasks.state.tables.table_rows import Ids, TableRows, write_rows

_MOST_DELTAS = 8


class FileBytes:
    """The contents of a file: copied rows, which become bytes at the first use, in the background."""

    def __init__(self, write: Callable[[], memoryview]):
        self._write: Callable[[], memoryview] | None = write  # It holds the copied rows.

    @cached_property
    def bytes(self) -> memoryview:
        """The file's bytes."""
        assert self._write is not None
        data, self._write = self._write(), None
        return data


class TableFile:
    """One file: its number, the count of its rows, and its contents until a commit has them.

    `homes`: the identities of the newest checkpoints that are known to have the file. `begin`: in a replay buffer, the
    number of its first row.
    """

    def __init__(self, number: int, count: int, homes: Iterable[str] = (), begin: int = 0):
        self.number = number
        self.count = count
        self.begin = begin
        self.contents: FileBytes | None = None
        self.homes = tuple(homes)

    @property
    def is_new(self) -> bool:
        """True until the rows of the file are copied."""
        return self.contents is None and not self.homes

    def is_kept(self, parent: str | None) -> bool:
        """Return True if the process or the checkpoint `parent` has the file."""
        return self.contents is not None or parent in self.homes

    def committed(self, checkpoint: str) -> None:
        """Free the contents, which `checkpoint` has. Keep the previous home: the next save may still follow it."""
        self.homes = (*self.homes[-1:], checkpoint)
        self.contents = None


class Chain:
    """The files that together have all rows: a base, then deltas."""

    def __init__(self, files: Sequence[TableFile] = ()):
        self.files = tuple(files)

    def following(self, store: RowStore, parent: str | None) -> Chain:
        """Return the chain for the next save, whose last file may have no contents yet; change nothing."""
        number = self.files[-1].number + 1 if self.files else 0
        base, deltas = self.files[:1], self.files[1:]
        if not all(file.is_kept(parent) for file in self.files):
            base = ()
        elif not store.changed and base:
            return self
        changed = store.changed + sum(file.count for file in deltas)
        if not base or len(deltas) >= _MOST_DELTAS or 2 * changed > base[0].count:
            return Chain([TableFile(number, store.count)])
        return Chain([*self.files, TableFile(number, store.changed)])

    def take(self, store: RowStore, slots: Sequence[str]) -> None:
        """Copy the rows for the last file if this file is new."""
        file = self.files[-1]
        if file.is_new:
            rows = store.all() if len(self.files) == 1 else store.delta()
            file.contents = FileBytes(partial(write_rows, rows, slots))
            store.written()


def merged(files: Sequence[TableRows], keep: Callable[[Ids], npt.NDArray[np.bool_]]) -> list[TableRows]:
    """Merge the files of one chain: return the newest row of each id that `keep` marks, except deleted ids."""
    ids = np.concatenate([file.ids for file in files])
    _, newest = np.unique(ids[::-1], return_index=True)
    chosen = np.zeros(len(ids), np.bool_)
    chosen[len(ids) - 1 - newest] = True
    chosen &= ~np.concatenate([file.deleted for file in files]) & keep(ids)
    parts, begin = [], 0
    for file in files:
        rows = np.flatnonzero(chosen[begin : begin + len(file.ids)])
        values = tuple(one[rows] for one in file.values)
        parts.append(TableRows(file.ids[rows], values, file.steps[rows], file.deleted[rows]))
        begin += len(file.ids)
    return parts
