"""The files of a lookup table: Arrow files of rows by id, which any Arrow reader can read.

Its columns are: the id; the row, and each optimizer slot (lists of `dim` numbers); the number of the table's last
update that changed the row; and a flag for a deleted id, whose numbers have no meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
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
Column = tuple[str, str, list[int]]  # Name, dtype, and the shape of a row's value; it becomes a list of fixed length.


class TableRows(NamedTuple):
    """Rows of a table: `values` has an array of rows and an array for each slot, with `dim` numbers for each id."""

    ids: Ids
    values: tuple[Floats, ...]
    steps: Ids
    deleted: npt.NDArray[np.bool_]


def write_rows(rows: TableRows, slots: Sequence[str]) -> memoryview:
    """Write rows as a file's bytes; `slots`: the names of the arrays after the rows."""
    columns: list[npt.NDArray[Any]] = [rows.ids, *rows.values, rows.steps, rows.deleted]
    return write_columns(_columns(rows.values[0].shape[1], slots), columns)


def read_rows(data: memoryview, dim: int, slots: Sequence[str], name: str) -> TableRows:
    """Read a file's rows as views of its verified bytes; raise IntegrityError if the file is malformed."""
    ids, *values, steps, deleted = read_columns(data, _columns(dim, slots), name)
    return TableRows(ids, tuple(values), steps, deleted)


def write_columns(columns: Sequence[Column], values: Sequence[npt.NDArray[Any]]) -> memoryview:
    """Write columns as the bytes of an uncompressed Arrow IPC file."""
    schema = _schema(columns)
    arrays = [array(one, field.type) for one, field in zip(values, schema, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    size = pa.MockOutputStream()
    _write(size, batch)
    data = np.empty(size.size(), np.uint8)  # Allocate the exact size, so that Arrow never copies to a larger buffer.
    _write(pa.FixedSizeBufferWriter(pa.py_buffer(data)), batch)
    return data.data


def read_columns(data: memoryview, columns: Sequence[Column], name: str) -> list[npt.NDArray[Any]]:
    """Read columns as views of verified bytes, each in its shape; raise IntegrityError if the file is malformed."""
    schema = _schema(columns)
    with well_formed("a file of the table", name, FAULTS):
        table = read_arrow(data, schema, _MAX_ROWS)
        found = [whole_column(table.column(n), field) for n, field in enumerate(schema)]
        return [
            numbers_of(one.values if shape else one).reshape(-1, *shape)
            for one, (_, _, shape) in zip(found, columns, strict=True)
        ]


def _write(sink: pa.NativeFile, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _columns(dim: int, slots: Sequence[str]) -> list[Column]:
    numbers = [(name, "float32", [dim]) for name in ("row", *slots)]
    return [("id", "int64", []), *numbers, ("step", "int64", []), ("deleted", "bool", [])]


def _schema(columns: Sequence[Column]) -> pa.Schema:
    fields = []
    for name, dtype, shape in columns:
        kind = pa.from_numpy_dtype(np.dtype(dtype))
        if shape:
            kind = pa.list_(pa.field("item", kind, nullable=False), prod(shape))
        fields.append(pa.field(name, kind, nullable=False))
    return pa.schema(fields)
