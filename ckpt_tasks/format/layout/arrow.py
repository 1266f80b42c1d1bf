"""Read and write Arrow files. Check a file's digest before it is read: Arrow trusts the numbers in it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# The exceptions that Arrow raises for hostile bytes.
FAULTS = (pa.ArrowException, OSError, ValueError, TypeError, AttributeError)

_EXTENSION = b"ARROW:extension"  # Libraries register readers of extension types; some unpickle.
_HERE = pa.ipc.IpcReadOptions(use_threads=False)  # A process may be at its limit of threads.
_FOOTER_END = 10  # The footer's size (4 bytes) and the magic word end the file.
_NUMBERS = {pa.from_numpy_dtype(kind): kind for kind in (np.uint8, np.int8, np.int16, np.int32, np.int64)}
_NUMBERS |= {pa.from_numpy_dtype(kind): kind for kind in (np.float16, np.float32, np.float64)}
_METRICS = pa.schema([pa.field("metric", pa.string(), nullable=False), pa.field("value", pa.float64(), nullable=False)])


def array(values: Sequence[Any] | npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Make an array of values of one type, without missing values.

    `pa.array` would import pandas if it is installed, which takes 0.3 s.
    """
    if pa.types.is_dictionary(kind):
        codes: dict[Any, int] = {}
        numbers = [codes.setdefault(value, len(codes)) for value in values]
        return pa.DictionaryArray.from_arrays(array(numbers, kind.index_type), array([*codes], kind.value_type))
    # The first buffer is the bitmap of missing values; None: no value is missing.
    buffers: list[pa.Buffer | None] = [None]
    children = []
    if pa.types.is_list(kind):
        buffers.append(_ends(values))
        children.append(array([*chain.from_iterable(values)], kind.value_type))
    elif pa.types.is_fixed_size_list(kind):
        children.append(array(np.reshape(values, -1), kind.value_type))
    elif pa.types.is_boolean(kind):
        buffers.append(pa.py_buffer(np.packbits(np.asarray(values, np.bool_), bitorder="little")))
    elif pa.types.is_string(kind):
        texts = [value.encode() for value in values]
        buffers += [_ends(texts), pa.py_buffer(b"".join(texts))]
    elif pa.types.is_fixed_size_binary(kind):
        buffers.append(pa.py_buffer(b"".join(values)))
    else:
        buffers.append(pa.py_buffer(np.ascontiguousarray(values, _NUMBERS[kind])))
    return pa.Array.from_buffers(kind, len(values), buffers, null_count=0, children=children or None)


def numbers_of(column: pa.Array) -> npt.NDArray[Any]:
    """View an array without missing values as a NumPy array, or copy booleans; `to_numpy` would import pandas."""
    is_flags = pa.types.is_boolean(column.type)
    kind = np.dtype(np.bool_ if is_flags else _NUMBERS[column.type])
    if not len(column):
        return np.empty(0, kind)
    if is_flags:
        bits = np.frombuffer(column.buffers()[1], np.uint8)
        end = column.offset + len(column)
        return np.unpackbits(bits, count=end, bitorder="little")[column.offset :].astype(kind)
    return np.frombuffer(column.buffers()[1], kind, len(column), column.offset * kind.itemsize)


def _ends(values: Sequence[Any] | npt.NDArray[Any]) -> pa.Buffer:
    """Return where each value begins in the joined values, and where the last value ends."""
    return pa.py_buffer(np.cumsum([0, *map(len, values)], dtype=np.int32))


def read_arrow(data: bytes | memoryview, schema: pa.Schema, max_rows: int) -> pa.Table:
    """Read a table as views of the file's bytes.

    Raises one of FAULTS if the bytes are malformed, or have another schema, a missing value or more than `max_rows`.
    """
    footer_bytes = int.from_bytes(data[-_FOOTER_END : -_FOOTER_END + 4], "little")
    if _EXTENSION in bytes(data[-_FOOTER_END - footer_bytes :]):
        raise ValueError("columns of extension types are not read")
    table = pa.ipc.open_file(pa.py_buffer(data), options=_HERE).read_all()
    if table.schema != schema:
        raise ValueError("it has other columns than this version's")
    if table.num_rows > max_rows:
        raise ValueError(f"{table.num_rows} rows, more than {max_rows}")
    table.validate(full=True)
    return table


def write_metrics(metrics: Mapping[str, float], about: Mapping[str, str]) -> bytes:
    """Write metrics as an Arrow IPC file, one row each; `about` becomes the schema's metadata."""
    schema = _METRICS.with_metadata({name.encode(): value.encode() for name, value in about.items()})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema) as writer:
        columns = [array([*metrics], pa.string()), array([*metrics.values()], pa.float64())]
        writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    return sink.getvalue()
