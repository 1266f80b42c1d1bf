"""Readers and writers of Arrow files; a reader treats a file as if an attacker had written it.

A file is a stream of messages between two magic words. The reader reads the stream and ignores the footer, which could
point elsewhere. From a message it takes only numbers: the row count, and the positions of the columns' bytes. Columns
are then views of the file's own bytes. Arrow's own reader gets only the schema: its code that decompresses, swaps or
copies buffers never runs, whatever a message's metadata says. So a table takes no more memory than its file. The reader
validates offsets and texts in full: Arrow itself would follow bad offsets out of its memory. Format:
arrow.apache.org/docs/format/Columnar.html, Message.fbs.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# The exceptions that Arrow raises for hostile bytes.
FAULTS = (pa.ArrowException, OSError, ValueError, TypeError, AttributeError)

_MAGIC = b"ARROW1"
_START = 8  # The magic word and two zero bytes.
_MOST_MESSAGES = 64  # Our own files have few: a schema, dictionaries and one batch.
_EXTENSION = b"ARROW:extension"  # Libraries register readers of extension types; some unpickle.
_GOES_ON = 0xFFFFFFFF  # Every message begins with this mark.
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # The kinds of a message.
_ALIGNMENT = 8
_NUMBERS = {pa.int32(): np.int32, pa.int64(): np.int64, pa.float32(): np.float32, pa.float64(): np.float64}
_METRICS = pa.schema([pa.field("metric", pa.string(), nullable=False), pa.field("value", pa.float64(), nullable=False)])


class _Message(NamedTuple):
    """A message: its kind, its header (a table of a flatbuffer), the bytes that hold both, and its body."""

    kind: int
    header: _Table
    bytes: pa.Buffer
    body: pa.Buffer


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
    """View an array without missing values as a NumPy array; `to_numpy` would import pandas."""
    kind = np.dtype(_NUMBERS[column.type])
    if not len(column):
        return np.empty(0, kind)
    return np.frombuffer(column.buffers()[1], kind, len(column), column.offset * kind.itemsize)


def _ends(values: Sequence[Any] | npt.NDArray[Any]) -> pa.Buffer:
    """Return where each value begins in the joined values, and where the last value ends."""
    return pa.py_buffer(np.cumsum([0, *map(len, values)], dtype=np.int32))


def read_arrow(data: bytes | memoryview, schema: pa.Schema, max_rows: int) -> pa.Table:
    """Read a table; raise one of FAULTS if the bytes are malformed, or have another schema or more than `max_rows`."""
    if data[:_START] != _MAGIC + b"\0\0" or data[-len(_MAGIC) :] != _MAGIC:
        raise ValueError("this is not an Arrow file")
    messages = [*islice(_messages(data), _MOST_MESSAGES + 1)]
    if not messages or len(messages) > _MOST_MESSAGES:
        raise ValueError(f"no message, or more than {_MOST_MESSAGES}")
    first, *rest = messages
    _check_schema(first, schema)
    words: dict[int, pa.Array] = {}
    batches: list[pa.RecordBatch] = []
    rows = 0
    for kind, header, _, body in rest:
        if kind == _DICTIONARY:
            if header.number(2, "<b"):
                raise ValueError("a dictionary that adds to another one is not read")
            batch = _Batch(header.table(1), body)
            words[header.number(0, "<q")] = batch.array(pa.string())
        elif kind == _BATCH:
            batch = _Batch(header, body)
            rows += batch.length
            if rows > max_rows:
                raise ValueError(f"{rows} rows, more than {max_rows}")
            batches.append(batch.columns(schema, words))
        else:
            raise ValueError(f"a message of kind {kind}")
    table = pa.Table.from_batches(batches, schema)
    table.validate(full=True)
    return table


def _messages(data: bytes | memoryview) -> Iterator[_Message]:
    buffer = pa.py_buffer(data)
    at = _START
    while True:
        mark, size_bytes = _read(data, "<I", at), _read(data, "<i", at + 4)
        if mark != _GOES_ON or size_bytes < 0:
            raise ValueError("a message that does not begin as one")
        if not size_bytes:
            return
        begin, body = at + 8, at + 8 + size_bytes
        if body > len(data):
            raise ValueError("a message that ends outside of the file")
        message = _Table.root(data[begin:body])
        body_bytes = message.number(3, "<q")
        if not 0 <= body_bytes <= len(data) - body:
            raise ValueError("a message whose body ends outside of the file")
        yield _Message(
            message.number(1, "<b"), message.table(2), buffer.slice(at, 8 + size_bytes), buffer.slice(body, body_bytes)
        )
        at = body + body_bytes


def _check_schema(message: _Message, schema: pa.Schema) -> None:
    if message.kind != _SCHEMA or _EXTENSION in message.bytes.to_pybytes():
        raise ValueError("it does not begin with its columns, or they are of extension types")
    if pa.ipc.read_schema(message.bytes) != schema:
        raise ValueError("it has other columns than this version's")


class _Batch:
    """The columns of one message, read one after the other in the order of the schema."""

    def __init__(self, header: _Table, body: pa.Buffer):
        if header.has(3):
            raise ValueError("compressed buffers are not read")
        self.length = header.number(0, "<q")
        self._nodes = header.pairs(1)
        self._buffers = header.pairs(2)
        self._body = body

    def columns(self, schema: pa.Schema, words: dict[int, pa.Array]) -> pa.RecordBatch:
        """Return the columns of the batch; `words`: the dictionaries, numbered in the order of their columns."""
        arrays, numbers = [], iter(range(len(schema)))
        for field in schema:
            if pa.types.is_dictionary(field.type):
                codes = self._take(field.type.index_type)
                arrays.append(pa.DictionaryArray.from_arrays(codes, words.get(next(numbers), array([], pa.string()))))
            else:
                arrays.append(self._take(field.type))
        if any(len(array) != self.length for array in arrays):
            raise ValueError("columns of different lengths")
        self._end()
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def array(self, kind: pa.DataType) -> pa.Array:
        """Return the only column of the batch."""
        array = self._take(kind)
        self._end()
        return array

    def _take(self, kind: pa.DataType) -> pa.Array:
        length, nulls = next(self._nodes, (-1, 0))
        if length < 0 or nulls:
            raise ValueError("a column is missing, or a value in one")
        self._buffer()  # Skip the bitmap of missing values.
        if pa.types.is_fixed_size_list(kind):
            values = self._take(kind.value_type)
            if len(values) != length * kind.list_size:
                raise ValueError("lists of another size")
            return pa.Array.from_buffers(kind, length, [None], null_count=0, children=[values])
        buffers = [None, self._buffer()]
        children = []
        if pa.types.is_string(kind):
            buffers.append(self._buffer())
        elif pa.types.is_list(kind):
            children.append(self._take(kind.value_type))
        if not length:
            return array([], kind)
        return pa.Array.from_buffers(kind, length, buffers, null_count=0, children=children or None)

    def _buffer(self) -> pa.Buffer:
        offset, size_bytes = next(self._buffers, (-1, 0))
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self._body.size or offset % _ALIGNMENT:
            raise ValueError("a column that lies outside of its message")
        return self._body.slice(offset, size_bytes)

    def _end(self) -> None:
        if next(self._nodes, None) is not None or next(self._buffers, None) is not None:
            raise ValueError("more columns than the schema has")


class _Table:
    """A table of a flatbuffer, which begins at offset `at` of `data`."""

    def __init__(self, data: bytes | memoryview, at: int):
        self._data = data
        self._at = at
        self._places = at - _read(data, "<i", at)

    @classmethod
    def root(cls, data: bytes | memoryview) -> _Table:
        """Return a flatbuffer's root table."""
        return cls(data, _read(data, "<I", 0))

    def has(self, field: int) -> bool:
        """Return True if the field is present."""
        return self._place(field) is not None

    def number(self, field: int, form: str) -> int:
        """Return the number in a field; 0 if the field is absent."""
        place = self._place(field)
        return 0 if place is None else _read(self._data, form, place)

    def table(self, field: int) -> _Table:
        """Return the table in a field."""
        return _Table(self._data, self._follow(field))

    def pairs(self, field: int) -> Iterator[tuple[int, int]]:
        """Yield the (int64, int64) pairs of a list field; nothing if the field is absent."""
        if not self.has(field):
            return
        at = self._follow(field)
        for n in range(_read(self._data, "<I", at)):
            yield _read(self._data, "<q", at + 4 + 16 * n), _read(self._data, "<q", at + 12 + 16 * n)

    def _follow(self, field: int) -> int:
        place = self._place(field)
        if place is None:
            raise ValueError("a message without its header")
        return place + _read(self._data, "<I", place)

    def _place(self, field: int) -> int | None:
        at = 4 + 2 * field
        offset = _read(self._data, "<H", self._places + at) if at < _read(self._data, "<H", self._places) else 0
        return self._at + offset if offset else None


def _read(data: bytes | memoryview, form: str, at: int) -> int:
    if not 0 <= at <= len(data) - struct.calcsize(form):
        raise ValueError("a message that points out of itself")
    number: int = struct.unpack_from(form, data, at)[0]
    return number


def write_metrics(metrics: Mapping[str, float], about: Mapping[str, str]) -> bytes:
    """Write metrics as an Arrow IPC file, one row each; `about` becomes the schema's metadata."""
    schema = _METRICS.with_metadata({name.encode(): value.encode() for name, value in about.items()})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema) as writer:
        columns = [array([*metrics], pa.string()), array([*metrics.values()], pa.float64())]
        writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    return sink.getvalue()
