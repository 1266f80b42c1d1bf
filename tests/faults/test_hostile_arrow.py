"""Arrow files whose messages ask for more than their bytes: none takes more memory than the file."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tasks.errors import CkptError
from ckpt_tasks.format.layout.arrow import FAULTS, read_arrow, write_metrics
from ckpt_tasks.format.layout.index import Index, IndexRow, write_index
from ckpt_tasks.format.layout.regions import Box
from tests.support.indexes import read_as_committed

Field = tuple[int, bytes | list[bytes]]


def flat(*fields: Field) -> bytes:
    """Write a table of a flatbuffer: numbers in place, and what stands in a list behind an offset.

    What this and the next functions return begins with the offset of what it holds.
    """
    slots = 1 + max(slot for slot, _ in fields)
    known = struct.pack("<HH", 4 + 2 * slots, 4 + 8 * slots)
    known += b"".join(struct.pack("<H", 8 + 8 * slot if slot in dict(fields) else 0) for slot in range(slots))
    known = known.ljust(-(-len(known) // 8) * 8, b"\0")
    inline, rest = bytearray(8 + 8 * slots), b""
    struct.pack_into("<i", inline, 0, len(known))
    for slot, value in fields:
        at = 8 + 8 * slot
        if isinstance(value, list):
            (body,) = value
            target = len(inline) + len(rest) + struct.unpack_from("<I", body)[0]
            struct.pack_into("<I", inline, at, target - at)
            rest += body.ljust(-(-len(body) // 8) * 8, b"\0")
        else:
            inline[at : at + len(value)] = value
    return struct.pack("<I", 8 + len(known)) + b"\0" * 4 + known + bytes(inline) + rest


def pairs(*numbers: tuple[int, int]) -> list[bytes]:
    """Write a list of pairs of numbers."""
    data = struct.pack("<I", len(numbers)) + b"".join(struct.pack("<qq", *pair) for pair in numbers)
    return [struct.pack("<I", 12) + b"\0" * 8 + data]


def batch(
    rows: int,
    nodes: list[bytes],
    buffers: list[bytes],
    body: bytes,
    *,
    kind: bytes = b"\3",
    claimed: int | None = None,
) -> bytes:
    """Write a message of one batch."""
    header = [flat((0, struct.pack("<q", rows)), (1, nodes), (2, buffers))]
    length = struct.pack("<q", len(body) if claimed is None else claimed)
    parts: list[Field] = [
        (0, struct.pack("<h", 3)), (1, kind), (2, header), (3, length),
    ]  # fmt: skip
    metadata = flat(*parts)
    metadata = metadata.ljust(-(-len(metadata) // 8) * 8, b"\0")
    return struct.pack("<Ii", 0xFFFFFFFF, len(metadata)) + metadata + body


def file_of(schema: pa.Schema, messages: bytes) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema):
        pass
    start = sink.getvalue()[:-8]  # without the end of the stream
    return b"ARROW1\0\0" + start + messages + struct.pack("<Ii", 0xFFFFFFFF, 0) + b"\0" * 6 + b"ARROW1"


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count the most bytes that Arrow holds in the block."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        yield lambda: pool.max_memory() or 0
    finally:
        pa.set_memory_pool(before)


PLACE = "checkpoint_000000000005/e000001-0123456789abcdef/model-00000-of-00001-0.safetensors"
ROWS = [
    IndexRow("model", f"w{n}", "float32", (2, 3), Box((0, 0), (2, 3)), PLACE, 4096 + 24 * n, 4120 + 24 * n, b"0" * 16)
    for n in range(20)
]
INDEX, METRICS = write_index(Index.of(ROWS)), write_metrics({"loss": 0.5, "accuracy": 0.75}, {"step": "1"})
SCHEMA = pa.schema([pa.field("metric", pa.string(), nullable=False), pa.field("value", pa.float64(), nullable=False)])
NUMBERS = st.sampled_from([0, 1, -1, 3, 7, 8, 1 << 16, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, -(1 << 63)])


@settings(max_examples=400)
@given(st.sampled_from([INDEX, METRICS]), st.lists(st.tuples(st.integers(0, 1 << 16), NUMBERS), min_size=1, max_size=3))
def test_whatever_number_stands_in_a_message_memory_is_bounded(data: bytes, changes: list[tuple[int, int]]) -> None:
    """P49: any number of a table changed to any other one: it is read or refused, and Arrow holds no more for it."""
    changed = bytearray(data)
    for at, number in changes:
        struct.pack_into("<q", changed, at * 4 % (len(data) - 8), number)
    with counted() as most:
        with suppress(CkptError, *FAULTS):
            if data is INDEX:
                read_as_committed(bytes(changed)).check("index.arrow")
            else:
                read_arrow(bytes(changed), SCHEMA, max_rows=1000)
        assert most() <= 8 * len(data)


VALUE = pa.schema([pa.field("value", pa.float64(), False)])
BODY = struct.pack("<2d", 0.5, 0.75)
NODES, BUFFERS = pairs((2, 0)), pairs((0, 0), (0, 16))
WRONG = {
    "a kind of message that is not a table's": (batch(2, NODES, BUFFERS, BODY, kind=b"\5"), "of kind 5"),
    "a body beyond the file": (batch(2, NODES, BUFFERS, BODY, claimed=1 << 40), "body ends outside"),
    "a body before the message": (batch(2, NODES, BUFFERS, BODY, claimed=-16), "body ends outside"),
    "a column before its message": (batch(2, NODES, pairs((0, 0), (-8, 16)), BODY), "outside of its message"),
    "a column of negative size": (batch(2, NODES, pairs((0, 0), (8, -8)), BODY), "outside of its message"),
    "a column beyond its message": (batch(2, NODES, pairs((0, 0), (8, 16)), BODY), "outside of its message"),
    "a column between two numbers": (batch(1, pairs((1, 0)), pairs((0, 0), (4, 8)), BODY), "outside of its message"),
    "a column that is missing": (batch(2, pairs(), BUFFERS, BODY), "column is missing"),
    "a column of negative length": (batch(2, pairs((-2, 0)), BUFFERS, BODY), "column is missing"),
    "a missing value": (batch(2, pairs((2, 1)), BUFFERS, BODY), "column is missing"),
    "a column too many": (batch(2, pairs((2, 0), (2, 0)), BUFFERS, BODY), "more columns"),
    "a buffer too many": (batch(2, NODES, pairs((0, 0), (0, 16), (0, 16)), BODY), "more columns"),
    "a batch of another length": (batch(3, NODES, BUFFERS, BODY), "different lengths"),
    "an old beginning": (batch(2, NODES, BUFFERS, BODY)[4:], "does not begin as one"),
    "a message of negative size": (struct.pack("<Ii", 0xFFFFFFFF, -64) + BODY, "does not begin as one"),
    "a message too many": (batch(2, NODES, BUFFERS, BODY) * 64, "more than 64"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_message_that_nobody_wrote_is_refused_for_what_it_is(what: str) -> None:
    """P49: Arrow follows a column out of its memory; what points there is refused before Arrow sees it."""
    good = read_arrow(file_of(VALUE, batch(2, NODES, BUFFERS, BODY) * 63), VALUE, 200)
    assert good.column("value").to_pylist() == [0.5, 0.75] * 63
    messages, words = WRONG[what]
    with pytest.raises(FAULTS, match=words):
        read_arrow(file_of(VALUE, messages), VALUE, 200)


def rewritten(data: bytes, **options: Any) -> bytes:
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue()


def of_words(*batches: list[str]) -> tuple[bytes, pa.Schema]:
    """Write a column of words whose dictionary grows from batch to batch."""
    schema = pa.schema([pa.field("word", pa.dictionary(pa.int32(), pa.string()), False)])
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)) as writer:
        for words in batches:
            column = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), pa.array(words))
            writer.write_batch(pa.RecordBatch.from_arrays([column], schema=schema))
    return sink.getvalue(), schema


def test_a_file_of_another_kind_is_refused() -> None:
    """P21, P35, P42, P49: cut, compressed, longer than asked for, with extension types, or words in pieces.

    What Arrow writes uncompressed, in either version of its format, is read.
    """
    data = file_of(VALUE, batch(2, NODES, BUFFERS, BODY))
    for wrong in (data[:-1], b"B" + data[1:], data[:7] + b"1" + data[8:], data[:-1] + b"2"):
        with pytest.raises(FAULTS, match="not an Arrow file"):
            read_arrow(wrong, VALUE, 2)
    for version in (pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5):
        assert read_arrow(rewritten(METRICS, metadata_version=version), SCHEMA, 2).num_rows == 2
    with pytest.raises(FAULTS, match="2 rows, more than 1"):
        read_arrow(METRICS, SCHEMA, 1)
    large = write_metrics({f"metric{n}": 0.5 for n in range(1000)}, {})
    for codec in ("zstd", "lz4"):
        with pytest.raises(FAULTS, match="compressed buffers are not read"):
            read_arrow(rewritten(large, compression=codec), SCHEMA, 1000)
    field = pa.field("value", pa.float64(), False, {"ARROW:extension:name": "x", "ARROW:extension:metadata": "y"})
    with pytest.raises(FAULTS, match="extension types"):  # other libraries register readers, some of which unpickle
        read_arrow(file_of(pa.schema([field]), batch(2, NODES, BUFFERS, BODY)), VALUE, 2)
    with pytest.raises(FAULTS, match="adds to another one"):
        read_arrow(*of_words(["a"], ["a", "b"]), 2)


def test_texts_are_looked_at_before_they_are_used() -> None:
    """P49: bytes that are no UTF-8 are found when an index is read, not when a restore asks for a name."""
    data = write_index(Index.of([ROWS[0]._replace(key="wwwwwwww")]))
    assert data.count(b"w" * 8) == 1
    with pytest.raises(CkptError, match="malformed"):
        read_as_committed(data.replace(b"w" * 8, b"\xff" * 8))
