"""Arrow files that are not what was written: each is read or refused with an error of ours."""

from __future__ import annotations

import io
import struct
from contextlib import suppress
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

PLACE = "checkpoint_000000000005/e000001-0123456789abcdef/model-00000-of-00001-0.safetensors"
ROWS = [
    IndexRow("model", f"w{n}", "float32", (2, 3), Box((0, 0), (2, 3)), PLACE, 4096 + 24 * n, 4120 + 24 * n, b"0" * 16)
    for n in range(20)
]
INDEX, METRICS = write_index(Index.of(ROWS)), write_metrics({"loss": 0.5, "accuracy": 0.75}, {})
SCHEMA = pa.schema([pa.field("metric", pa.string(), nullable=False), pa.field("value", pa.float64(), nullable=False)])
NUMBERS = st.sampled_from([0, 1, -1, 3, 7, 8, 1 << 16, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, -(1 << 63)])


@settings(max_examples=200)
@given(st.sampled_from([INDEX, METRICS]), st.lists(st.tuples(st.integers(0, 1 << 16), NUMBERS), min_size=1, max_size=3))
def test_a_changed_file_is_read_or_refused(data: bytes, changes: list[tuple[int, int]]) -> None:
    """P49: any number of a table changed to any other one ends in a table, or in an error of ours."""
    changed = bytearray(data)
    for at, number in changes:
        struct.pack_into("<q", changed, at * 4 % (len(data) - 8), number)
    with suppress(CkptError, *FAULTS):
        if data is INDEX:
            read_as_committed(bytes(changed)).check("index.arrow")
        else:
            read_arrow(bytes(changed), SCHEMA, max_rows=1000)


def test_a_file_of_another_kind_is_refused() -> None:
    """P21, P35, P42, P49: a cut file, other columns, more rows than asked for, and columns of extension types."""
    assert read_arrow(METRICS, SCHEMA, 2).column("value").to_pylist() == [0.5, 0.75]
    for wrong in (METRICS[:-1], METRICS[:100], METRICS[:-1] + b"2", b""):
        with pytest.raises(FAULTS):
            read_arrow(wrong, SCHEMA, 2)
    with pytest.raises(FAULTS, match="2 rows, more than 1"):
        read_arrow(METRICS, SCHEMA, 1)
    with pytest.raises(FAULTS, match="other columns"):
        read_arrow(METRICS, pa.schema([SCHEMA.field(0)]), 2)
    with pytest.raises(FAULTS, match="extension types"):  # other libraries register readers, some of which unpickle
        read_arrow(of_an_extension(), SCHEMA, 2)


def of_an_extension() -> bytes:
    about: Any = {"ARROW:extension:name": "x", "ARROW:extension:metadata": "y"}
    table = pa.Table.from_arrays([pa.array([0.5])], schema=pa.schema([pa.field("value", pa.float64(), False, about)]))
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def test_texts_are_looked_at_before_they_are_used() -> None:
    """P49: bytes that are no UTF-8 are found when an index is read, not when a restore asks for a name."""
    data = write_index(Index.of([ROWS[0]._replace(key="wwwwwwww")]))
    assert data.count(b"w" * 8) == 1
    with pytest.raises(CkptError, match="malformed"):
        read_as_committed(data.replace(b"w" * 8, b"\xff" * 8))
