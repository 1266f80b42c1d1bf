"""The files of a lookup table: Arrow files of rows by id, which any Arrow reader can read.

The columns are: the id; the row, and each optimizer slot (lists of `dim` numbers); the number of the table's last
update that changed the row; and a flag for a deleted id, whose numbers have no meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ckpt_tasks.format.layout.arrow import FAULTS, array, numbers_of, read_arrow
from ckpt_tasks.format.layout.columns import whole_column
from ckpt_tasks.format.parsing import well_formed

_MAX_ROWS = 1 << 40

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class TableRows(NamedTuple):
    """Rows of a table: `values` has an array of rows and an array for each slot, with `dim` numbers for each id."""

    ids: Ids
    values: tuple[Floats, ...]
    steps: Ids
    deleted: npt.NDArray[np.bool_]


def write_rows(rows: TableRows, slots: Sequence[str]) -> memoryview:
    """Write rows as the bytes of an uncompressed Arrow IPC file; `slots`: the names of the arrays after the rows."""
    schema = _schema(rows.values[0].shape[1], slots)
    columns: list[npt.NDArray[Any]] = [rows.ids, *rows.values, rows.steps, rows.deleted]
    arrays = [array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    size = pa.MockOutputStream()
    _write(size, batch)
    data = np.empty(size.size(), np.uint8)  # Allocate the exact size, so that Arrow never copies to a larger buffer.
    _write(pa.FixedSizeBufferWriter(pa.py_buffer(data)), batch)
    return data.data


def read_rows(data: memoryview, dim: int, slots: Sequence[str], name: str) -> TableRows:
    """Read a file's rows as views of its verified bytes; raise IntegrityError if the file is malformed."""
    schema = _schema(dim, slots)
    with well_formed("a file of the table", name, FAULTS):
        table = read_arrow(data, schema, _MAX_ROWS)
        columns = [whole_column(table.column(n), field) for n, field in enumerate(schema)]
        ids, *values, steps, deleted = columns
        bits = deleted.buffers()[1] if len(deleted) else b""
        return TableRows(
            numbers_of(ids),
            tuple(numbers_of(column.values).reshape(-1, dim) for column in values),
            numbers_of(steps),
            np.unpackbits(np.frombuffer(bits, np.uint8), count=len(deleted), bitorder="little").astype(np.bool_),
        )


def _write(sink: pa.NativeFile, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _schema(dim: int, slots: Sequence[str]) -> pa.Schema:
    numbers = pa.list_(pa.field("item", pa.float32(), nullable=False), dim)
    kinds = {
        "id": pa.int64(),
        "row": numbers,
        **dict.fromkeys(slots, numbers),
        "step": pa.int64(),
        "deleted": pa.bool_(),
    }
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])
