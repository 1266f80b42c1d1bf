"""Assemble tensors from their regions: read, verify, put into order."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.layout.image import ALIGNMENT, STORED_DTYPES
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.run.opening import Opened, changes_in, merge_runs
from ckpt_tasks.storage.port import Store


def regions_of(opened: Opened, keys: Iterable[str]) -> dict[str, list[IndexRow]]:
    """Return the regions of these tensors, by full key."""
    regions: dict[str, list[IndexRow]] = {key: [] for key in keys}
    for row in opened.rows:
        if row.full_key in regions:
            regions[row.full_key].append(row)
    return regions


def verified_runs(store: Store, rows: Iterable[IndexRow]) -> Iterator[tuple[list[IndexRow], memoryview]]:
    """Read contiguous regions together; yield each such run with its bytes, which are valid until the next run.

    Raises IntegrityError if bytes have changed.
    """
    runs = merge_runs(rows)
    buffer = memoryview(mmap.mmap(-1, max((run[-1].end - run[0].begin for run in runs), default=0) + ALIGNMENT))
    for run in runs:
        begin, size_bytes = run[0].begin, run[-1].end - run[0].begin
        data = buffer[begin % ALIGNMENT :][:size_bytes]  # Direct reads need the same alignment as in the file.
        store.read(run[0].object, begin, data)
        faults = changes_in(run, data)
        if faults:
            raise IntegrityError(faults[0])
        yield run, data


def bytes_before(row: IndexRow) -> int | None:
    """Return a region's byte offset in its tensor (in C order); None if the tensor has its bytes in several spans."""
    extents = row.box.shape
    first = next((axis for axis, extent in enumerate(extents) if extent != 1), len(extents))
    if extents[first + 1 :] != row.tensor_shape[first + 1 :]:
        return None
    elements = 0
    for offset, extent in zip(row.box.offset, row.tensor_shape, strict=True):
        elements = elements * extent + offset
    return elements * STORED_DTYPES[row.dtype].nbytes


def lay_out(
    regions: Mapping[str, Sequence[IndexRow]], begins: Mapping[str, int]
) -> tuple[dict[IndexRow, int], list[tuple[Sequence[IndexRow], int]]]:
    """Return each region's offset in a file, and the tensors to assemble first; `begins` has each tensor's offset."""
    places: dict[IndexRow, int] = {}
    gathered: list[tuple[Sequence[IndexRow], int]] = []
    for key, begin in begins.items():
        before = {row: bytes_before(row) for row in regions[key]}
        if None in before.values():
            gathered.append((regions[key], begin))
        else:
            places.update({row: begin + (size_bytes or 0) for row, size_bytes in before.items()})
    return places, gathered


def gather(store: Store, rows: Sequence[IndexRow]) -> memoryview:
    """Assemble a tensor in memory from all of its regions; return its bytes in C order."""
    tensor = np.empty((*rows[0].tensor_shape, STORED_DTYPES[rows[0].dtype].nbytes), np.uint8)
    for run, data in verified_runs(store, rows):
        for row in run:
            box = tuple(slice(begin, begin + extent) for begin, extent in zip(*row.box, strict=True))
            values = np.frombuffer(data[row.begin - run[0].begin : row.end - run[0].begin], np.uint8)
            tensor[box] = values.reshape(*row.box.shape, -1)
    return tensor.reshape(-1).data
