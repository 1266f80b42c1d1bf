"""The tensors of a checkpoint in a remote store: every byte is requested once, by one rank of a host.

A few large reads, several at a time, fill memory that is laid out like the objects: so a read needs no copy, and gaps
between reads take no memory, since their pages are never touched. The ranks of a host map each other's memory
(sharing.py). A read whose bytes fail verification is repeated once before the checkpoint is given up.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ckpt_tasks.checkpoint.ranks.exchange import ALONE, Together
from ckpt_tasks.checkpoint.restore.boxes import box_of, boxes_in_order, meets, pieces, stacked, within
from ckpt_tasks.checkpoint.restore.sharing import ReadShare, share_reads
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.format.layout.regions import Box
from ckpt_tasks.format.policy.ranges import Span, merge_spans
from ckpt_tasks.process import in_threads
from ckpt_tasks.run.opening import READ_BYTES, by_object, changes_in
from ckpt_tasks.state.tensors.placements import is_sharded
from ckpt_tasks.state.tensors.tensors import copy_all, tensor_at, without_values
from ckpt_tasks.storage.port import ReadableStore

_PAGE = 4096

Read = tuple[str, Span, list[IndexRow]]
_Pair = tuple[torch.Tensor, str]


class DownloadedTensors:
    """The tensors of `rows`, downloaded from a store in a few large reads; see `TensorSource`.

    A tensor may be stored as boxes that many ranks wrote; a DTensor takes this rank's box. Only regions that hold a
    wanted element are read. All ranks must call `fetch`.
    """

    _threads = 8

    def __init__(self, store: ReadableStore, rows: Iterable[IndexRow], together: Together | None = None):
        self._store = store
        self._together = together or Together(ALONE)
        self._rows = sorted(rows, key=lambda row: (row.object, row.begin))
        self._by_key: dict[str, list[IndexRow]] = {}
        for row in self._rows:
            self._by_key.setdefault(row.full_key, []).append(row)
        self._memory = {name: _laid(rows) for name, rows in by_object(self._rows).items()}
        self._fetched: set[IndexRow] = set()  # The rows whose bytes have been downloaded.
        self._share: ReadShare | None = None
        self._fills: list[_Pair] = []

    def like(self, key: str) -> torch.Tensor:
        row = self._by_key[key][0]
        return without_values(row.dtype, row.tensor_shape)

    def read(self, key: str) -> torch.Tensor:
        self._get(self._by_key[key])
        if boxes_in_order(self._by_key[key]):
            return self._view(self._by_key[key][0], self._by_key[key][0].tensor_shape)
        like = self.like(key)
        values = torch.empty(like.shape, dtype=like.dtype)
        self.copy([(values, key)])
        return values

    def fill(self, into: torch.Tensor, key: str) -> None:
        self._fills.append((into, key))

    def fetch(self, pairs: Sequence[_Pair] = (), *, verify: bool = True) -> None:
        """Download and verify all regions, since `copy` reads nothing."""
        fills, self._fills = self._fills, []
        boxes: dict[str, list[Box]] = {}
        for into, key in (*fills, *pairs):
            boxes.setdefault(key, []).append(box_of(into, key))
        needed = [row for row in self._rows if row.full_key not in boxes or meets(row, boxes[row.full_key])]
        needed = [row for row in needed if row not in self._fetched]
        self._share = share_reads(self._together, needed, kept=True)
        self._get(needed if self._share is None else self._share.mine(needed))
        if self._together.size > 1:
            self._together()  # By now the other ranks of this host have read and verified their parts.
        self.copy(fills)

    def copy(self, pairs: Sequence[_Pair]) -> None:
        copy_all([piece for into, key in pairs for piece in self._pieces(into, key)])

    def _pieces(self, into: torch.Tensor, key: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of a part of the target and its values."""
        rows = self._by_key[key]
        if not is_sharded(into) and self._share is None and boxes_in_order(rows):
            yield into, self._view(rows[0], rows[0].tensor_shape)
            return
        for piece in pieces(into, key, stacked(rows) if self._share is None else rows):
            yield piece.into, within(self._view(piece.row), piece.box, piece.row.box)

    def _view(self, row: IndexRow, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        memory, begin = self._place(row)
        return tensor_at(memory, row.dtype, row.box.shape if shape is None else shape, begin)

    def _place(self, row: IndexRow) -> tuple[memoryview, int]:
        """Return the memory for a region's bytes, and the offset of the region in it."""
        if self._share is not None and row not in self._fetched:
            return self._share.at(row)
        laid = self._memory[row.object]
        return laid.memory, row.begin - laid.base

    def _get(self, rows: Sequence[IndexRow]) -> None:
        reads = [*_reads([row for row in rows if row not in self._fetched], self._store.gap_bytes)]
        in_threads(self.read_span, reads, self._threads, "ckpt-download")
        if self._share is None:
            self._fetched.update(rows)

    def read_span(self, read: Read) -> None:
        """Read and verify a span of an object's bytes; raise IntegrityError if they have changed."""
        name, span, rows = read
        memory, begin = self._place(rows[0])
        begin -= rows[0].begin - span.begin
        data = memory[begin : begin + span.end - span.begin]
        for again in (True, False):
            self._store.read(name, span.begin, data)
            faults = [fault for row in rows for fault in changes_in([row], data[row.begin - span.begin :])]
            if not faults:
                return
            if not again:
                raise IntegrityError(faults[0])


class Laid(NamedTuple):
    """The memory into which an object is read; its first byte is byte `base` of the object."""

    base: int
    memory: memoryview


def _laid(rows: Sequence[IndexRow]) -> Laid:
    """Return memory for rows of an object; pages that are never touched take no memory."""
    base = rows[0].begin // _PAGE * _PAGE
    return Laid(base, memoryview(mmap.mmap(-1, max(1, max(row.end for row in rows) - base))))


def _reads(rows: Iterable[IndexRow], gap_bytes: int) -> Iterator[Read]:
    for name, here in by_object(rows).items():
        spans = merge_spans((Span(row.begin, row.end) for row in here), gap_bytes=gap_bytes, max_bytes=READ_BYTES)
        left = iter(sorted(here, key=lambda row: (row.begin, row.end)))
        row = next(left, None)
        for span in spans:
            within = []
            while row is not None and row.end <= span.end:
                within.append(row)
                row = next(left, None)
            yield name, span, within
