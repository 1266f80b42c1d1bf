"""Read two checkpoints region by region and measure how far apart their tensors are.

The states may be larger than memory: at most four reads of 16 MiB are kept for each checkpoint. Every region is read
and verified, so regions with equal digests are equal. torch is imported only to compare regions that may differ.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckpt_tasks.checkpoint.transfer.placing import regions_of
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.layout.image import ALIGNMENT
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.format.layout.regions import Box, intersection
from ckpt_tasks.run.opening import READ_BYTES, Opened, changes_in, check_header, merge_runs
from ckpt_tasks.storage.port import Store

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.transfer.distance import Distance

_READS_KEPT = 4  # If the checkpoints cut a tensor differently, a region overlaps several regions of the other one.


class Regions:
    """The regions of one checkpoint, read in runs of contiguous regions and verified; keeps the last few runs."""

    def __init__(self, store: Store, opened: Opened):
        self.opened = opened
        self.rows = regions_of(opened, opened.tensors)
        self._store = store
        self._runs: dict[tuple[str, int], list[IndexRow]] = {}
        self._kept: OrderedDict[tuple[str, int], mmap.mmap] = OrderedDict()
        for run in merge_runs(opened.rows):
            self._runs.update({(row.object, row.begin): run for row in run if row.end > row.begin})
        for record in opened.manifest.objects:
            check_header(store, record)

    def place(self, pair_key: str) -> tuple[str, int]:
        """Return the object and the offset of a tensor, by which tensors are sorted to read files in order."""
        first = min(self.rows[pair_key], key=lambda row: (row.object, row.begin))
        return first.object, first.begin

    def region(self, row: IndexRow) -> tuple[mmap.mmap, int]:
        """Return a buffer with a region's verified bytes, and their offset; raise IntegrityError for damaged bytes."""
        run = self._runs[row.object, row.begin]
        first = run[0]
        # Direct reads need the same alignment in the buffer as in the file.
        start, known = first.begin % ALIGNMENT, (first.object, first.begin)
        if known in self._kept:
            self._kept.move_to_end(known)
        else:
            size_bytes = run[-1].end - first.begin
            buffer = self._buffer(start + size_bytes)
            data = memoryview(buffer)[start : start + size_bytes]
            self._store.read(first.object, first.begin, data)
            faults = changes_in(run, data)
            if faults:
                raise IntegrityError(faults[0], step=self.opened.manifest.step)
            self._kept[known] = buffer
        return self._kept[known], start + row.begin - first.begin

    def _buffer(self, size_bytes: int) -> mmap.mmap:
        oldest = self._kept.popitem(last=False)[1] if len(self._kept) == _READS_KEPT else None
        if oldest is not None and len(oldest) >= size_bytes:
            return oldest  # Reuse this buffer: to allocate a new one would take longer than the read.
        return mmap.mmap(-1, max(size_bytes, READ_BYTES + ALIGNMENT))


def distances(a: Regions, b: Regions, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Distance]:
    """Return the distance of each pair of tensors (full keys); omit equal pairs.

    The tensors of a pair must have the same dtype and shape. Raises IntegrityError or StoreError if bytes are damaged.
    """
    apart = {}
    for key_a, key_b in sorted(set(pairs), key=lambda both: a.place(both[0])):
        far = _distance(a, a.rows[key_a], b, b.rows[key_b])
        if far is not None:
            apart[key_a, key_b] = far
    return apart


def _distance(a: Regions, rows_a: list[IndexRow], b: Regions, rows_b: list[IndexRow]) -> Distance | None:
    far: Distance | None = None
    for row_a in rows_a:
        for row_b in rows_b:
            box = intersection(row_a.box, row_b.box)
            if box is None:
                continue
            at_a, at_b = a.region(row_a), b.region(row_b)
            if row_a.box == row_b.box and row_a.digest == row_b.digest:
                continue
            from ckpt_tasks.checkpoint.transfer.distance import distance
            from ckpt_tasks.state.tensors.tensors import tensor_at

            one = tensor_at(at_a[0], row_a.dtype, row_a.box.shape, at_a[1])[_slices(row_a.box, box)]
            other = tensor_at(at_b[0], row_b.dtype, row_b.box.shape, at_b[1])[_slices(row_b.box, box)]
            more = distance(one, other)
            if more.differing:
                far = more if far is None else far + more
    return far


def _slices(outer: Box, inner: Box) -> tuple[slice, ...]:
    begins = [i - o for i, o in zip(inner.offset, outer.offset, strict=True)]
    return tuple(slice(begin, begin + extent) for begin, extent in zip(begins, inner.shape, strict=True))
