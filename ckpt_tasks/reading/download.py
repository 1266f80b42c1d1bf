"""The tensors of a checkpoint in a store that is far away: every byte is asked for once.

What is wanted comes in a few large reads, several at a time, into memory that is laid out like the objects: so a read
needs no copy, and what lies between takes no memory, as it is never touched. A read whose bytes are not what was
written is made once more before the checkpoint is given up.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence

import torch

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.index import IndexRow
from ckpt_tasks.policy.ranges import Span, merge_spans
from ckpt_tasks.reading.opening import READ_BYTES, verify_run
from ckpt_tasks.state.processes import in_threads
from ckpt_tasks.state.tensors import copy_all, tensor_at
from ckpt_tasks.storage.port import ReadableStore

__all__ = ["DownloadedTensors"]

_IN_FLIGHT = 8
_PAGE = 4096

_Read = tuple[str, Span, list[IndexRow]]


class DownloadedTensors:
    """The tensors of `rows`, fetched from a store as a whole; see `TensorSource`."""

    def __init__(self, store: ReadableStore, rows: Iterable[IndexRow]):
        self._store = store
        self._rows = sorted(rows, key=lambda row: (row.object, row.begin))
        self._first: dict[str, IndexRow] = {}
        for row in self._rows:
            self._first.setdefault(row.full_key, row)
        self._memory = {name: _Laid(rows) for name, rows in _by_object(self._rows)}
        self._fetched: set[IndexRow] = set()
        self._fills: list[tuple[torch.Tensor, str]] = []

    def like(self, key: str) -> torch.Tensor:
        row = self._first[key]
        return torch.empty(row.tensor_shape, dtype=getattr(torch, row.dtype), device="meta")

    def read(self, key: str) -> torch.Tensor:
        self._get([row for row in self._rows if row.full_key == key])
        return self._at(key)

    def fill(self, into: torch.Tensor, key: str) -> None:
        self._fills.append((into, key))

    def fetch(self) -> None:
        self._get(self._rows)
        fills, self._fills = self._fills, []
        self.copy(fills)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, str]]) -> None:
        copy_all([(into, self._at(key)) for into, key in pairs])

    def _at(self, key: str) -> torch.Tensor:
        row = self._first[key]
        laid = self._memory[row.object]
        return tensor_at(laid.memory, row.dtype, row.tensor_shape, row.begin - laid.base)

    def _get(self, rows: Sequence[IndexRow]) -> None:
        reads = [*_reads([row for row in rows if row not in self._fetched], self._store.gap_bytes)]
        in_threads(self._read, reads, _IN_FLIGHT, "ckpt-download")
        self._fetched.update(rows)

    def _read(self, read: _Read) -> None:
        name, span, rows = read
        laid = self._memory[name]
        data = memoryview(laid.memory)[span.begin - laid.base : span.end - laid.base]
        for again in (True, False):
            self._store.read(name, span.begin, data)
            faults = [fault for row in rows for fault in verify_run([row], data[row.begin - span.begin :])]
            if not faults:
                return
            if not again:
                raise IntegrityError(faults[0])


class _Laid:
    """Memory that stands for an object's bytes from `base` on; what is never read is never taken."""

    def __init__(self, rows: Sequence[IndexRow]):
        self.base = rows[0].begin // _PAGE * _PAGE
        self.memory = mmap.mmap(-1, max(1, max(row.end for row in rows) - self.base))


def _by_object(rows: Iterable[IndexRow]) -> Iterator[tuple[str, list[IndexRow]]]:
    found: dict[str, list[IndexRow]] = {}
    for row in rows:
        found.setdefault(row.object, []).append(row)
    yield from found.items()


def _reads(rows: Iterable[IndexRow], gap_bytes: int) -> Iterator[_Read]:
    for name, here in _by_object(rows):
        spans = merge_spans((Span(row.begin, row.end) for row in here), gap_bytes=gap_bytes, max_bytes=READ_BYTES)
        left = iter(sorted(here, key=lambda row: (row.begin, row.end)))
        row = next(left, None)
        for span in spans:
            within = []
            while row is not None and row.end <= span.end:
                within.append(row)
                row = next(left, None)
            yield name, span, within
