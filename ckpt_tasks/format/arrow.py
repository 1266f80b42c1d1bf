"""Arrow files, read as if an attacker had written them.

A file is a stream of messages between two magic words, and is read as that stream: the footer, which could point to
other places, is not looked at. Before anything is made of a message these are refused: compressed buffers (a small one
can become gigabytes; of zeros zstd makes 32,000 times less), extension types (other libraries register readers for
them, some of which unpickle), and more messages than are written. Afterwards offsets and texts are validated in full:
Arrow itself follows bad offsets out of its memory. Format: arrow.apache.org/docs/format/Columnar.html, Message.fbs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice

import pyarrow as pa

__all__ = ["FAULTS", "read_arrow"]

FAULTS = (pa.ArrowException, OSError, ValueError, TypeError, AttributeError)  # what hostile bytes make Arrow raise

_MAGIC = b"ARROW1"
_START = 8  # the magic word and two zero bytes
_MOST_MESSAGES = 64  # a table is written as its schema, its dictionaries and one batch
_EXTENSION = b"ARROW:extension"
_BATCH, _DICTIONARY = "record batch", "dictionary"
_HEADER, _DATA, _COMPRESSION = 2, 1, 3  # fields of a Message, of a DictionaryBatch, and of a RecordBatch


def read_arrow(data: bytes, schema: pa.Schema, max_rows: int) -> pa.Table:
    """Read a table of this very schema; raise one of FAULTS where the bytes are no such file or hold more rows."""
    if data[:_START] != _MAGIC + b"\0\0" or not data.endswith(_MAGIC):
        raise ValueError("this is no Arrow file")
    stream = pa.py_buffer(data).slice(_START)
    messages = [*islice(_messages(stream), _MOST_MESSAGES + 1)]
    if len(messages) > _MOST_MESSAGES:
        raise ValueError(f"more than {_MOST_MESSAGES} messages")
    for message in messages:
        _check(message)
    reader = pa.ipc.open_stream(stream)
    if reader.schema != schema:
        raise ValueError("it has other columns than this version's")
    table = reader.read_all()
    if table.num_rows > max_rows:
        raise ValueError(f"{table.num_rows} rows, more than {max_rows}")
    table.validate(full=True)
    return table


def _messages(stream: pa.Buffer) -> Iterator[pa.Message]:
    reader = pa.ipc.MessageReader.open_stream(stream)
    while True:
        try:
            yield reader.read_next_message()
        except StopIteration:
            return


def _check(message: pa.Message) -> None:
    metadata = message.metadata.to_pybytes()
    if message.type == "schema":
        if _EXTENSION in metadata:
            raise ValueError("extension types are not read")
    elif message.type not in (_BATCH, _DICTIONARY):
        raise ValueError(f"a message of type {message.type}")
    elif _is_compressed(metadata, message.type):
        raise ValueError("compressed buffers are not read")


def _is_compressed(metadata: bytes, kind: str) -> bool:
    batch = _table(metadata, _table(metadata, 0, None), _HEADER)
    if kind == _DICTIONARY:
        batch = _table(metadata, batch, _DATA)
    return _field(metadata, batch, _COMPRESSION) is not None


def _table(metadata: bytes, at: int, number: int | None) -> int:
    """Follow an offset to a table of a flatbuffer: that of a field, or the one at `at` itself."""
    place = at if number is None else _field(metadata, at, number)
    if place is None:
        raise ValueError("a message without its batch")
    return place + _read(metadata, "<I", place)


def _field(metadata: bytes, table: int, number: int) -> int | None:
    """Return where a field of a flatbuffer's table lies; None where it is left out."""
    known = table - _read(metadata, "<i", table)
    place = 4 + 2 * number
    offset = _read(metadata, "<H", known + place) if place < _read(metadata, "<H", known) else 0
    return table + offset if offset else None


def _read(metadata: bytes, form: str, at: int) -> int:
    if not 0 <= at <= len(metadata) - struct.calcsize(form):
        raise ValueError("a message that points out of itself")
    found: int = struct.unpack_from(form, metadata, at)[0]
    return found
