"""The index: rows come back, holes are found, and bytes that nobody wrote are refused."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.errors import CkptError, IntegrityError, UnsupportedStateError
from ckpt_tasks.format.digests import digest_bytes
from ckpt_tasks.format.layout import columns
from ckpt_tasks.format.layout import index as index_module
from ckpt_tasks.format.layout.image import TensorSpec, plan_image
from ckpt_tasks.format.layout.index import Index, IndexRow, write_index
from ckpt_tasks.format.layout.regions import Box
from tests.format.layout.test_image import specs
from tests.support.indexes import indexed, read_as_committed

PLACE = "checkpoint_000000000005/e000001-0123456789abcdef/model-00000-of-00001-0.safetensors"


def rows_of(wanted: list[TensorSpec], place: str = PLACE) -> list[IndexRow]:
    return [
        IndexRow("model", slot.spec.name, slot.spec.dtype, slot.spec.shape, box, place, begin, end, digest_bytes(b""))
        for slot in plan_image(wanted).slots
        for box, begin, end in slot.regions()
    ]


def row(**changes: Any) -> IndexRow:
    [first] = rows_of([TensorSpec("w", "float32", (2, 3))])
    return first._replace(**changes)


@given(specs)
def test_rows_come_back_as_they_were(wanted: list[TensorSpec]) -> None:
    """The index of any layout is read back equal, and has no holes."""
    rows = rows_of(wanted)
    assert [*indexed(rows).rows] == rows
    assert indexed(rows).coverage_faults() == []
    assert indexed(rows).tensors == {found.full_key: (found.dtype, found.tensor_shape) for found in rows}


@given(st.integers(0, 3000), st.integers(0, 255))
def test_damage_with_a_fitting_digest_is_an_error_of_ours(at: int, value: int) -> None:
    """P49: even where the digest fits, an index that makes no sense raises our error and nothing else."""
    changed = bytearray(
        write_index(Index.of(rows_of([TensorSpec("w", "float32", (2, 3)), TensorSpec("v", "bool", (3,))])))
    )
    changed[at % len(changed)] = value
    data = bytes(changed)
    with suppress(CkptError):
        index = read_as_committed(data)
        index.coverage_faults()
        index.object_faults({PLACE: (4096, 4123)})
        assert all(isinstance(found, IndexRow) for found in index.rows)


@pytest.mark.parametrize(
    "bad",
    [
        {"object": "../../etc/passwd"},
        {"object": "simplecache::http://host/x"},
        {"object": "/etc/passwd"},
        {"group": "a/b"},
        {"group": ".."},
        {"dtype": "object"},
        {"dtype": "object", "end": 4102},
        {"begin": -4},
        {"begin": -24, "end": 0},
        {"begin": 4098, "end": 4122},
        {"tensor_shape": (1 << 23,), "box": Box((0,), (1 << 23,)), "end": 4096 + (4 << 23)},
        {"tensor_shape": (1,) * 65, "box": Box((0,) * 65, (1,) * 65), "end": 4100},
        {"end": 10**9},
        {"begin": 4096, "end": 4096},
        {"tensor_shape": (-2, -3), "box": Box((0, 0), (-2, -3))},
        {"box": Box((-1, 0), (2, 3))},
        {"tensor_shape": (2, 3), "box": Box((0, 0), (-2, -3))},
        {"box": Box((0,), (2, 3))},
        {"box": Box((0, 0, 0), (2, 3))},
        {"box": Box((0,), (6,))},
        # Products that a number of 64 bits takes for 0, for 6 and for -1.
        {"tensor_shape": (2**32, 2**32), "box": Box((0, 0), (2**32, 2**32)), "end": 4096},
        {"tensor_shape": (2**63 - 1, 2**63 - 1, 6), "box": Box((0, 0, 0), (2**63 - 1, 2**63 - 1, 6))},
        {"tensor_shape": (2**40, 2**40), "box": Box((0, 0), (2**40, 2**40)), "begin": 4100, "end": 4096},
        {"tensor_shape": (2**61, 0), "box": Box((0, 0), (2**61, 0)), "end": 4096},
    ],
    ids=str,
)
def test_a_row_that_nobody_wrote_is_refused(bad: dict[str, Any]) -> None:
    """P42, P49: names with a way out, URLs, other dtypes, bytes that do not fit the shape: refused on reading."""
    with pytest.raises(IntegrityError):
        indexed([row(**bad)])


def table_of(**columns: Any) -> pa.Table:
    table = pa.ipc.open_file(pa.BufferReader(write_index(Index.of([row(), row(key="v")])))).read_all()
    for name, values in columns.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))
    return table


def written(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"ARROW1\0\0", b"x" * 100),
        written(table_of(key=["w", None])),
        written(table_of(begin=[4096, None])),
        written(table_of(offset=[[0, 0], None])),
        written(table_of(offset=[[0, 0], [0, None]])),
        written(table_of(digest=[b"0" * 16, None])),
        written(table_of().drop_columns(["digest"])),
        written(table_of().rename_columns([name.upper() for name in table_of().column_names])),
        written(pa.table({})),
    ],
)
def test_another_file_another_table_and_nulls_are_refused(data: bytes) -> None:
    """P49: bytes that are no Arrow file, another table, and a null where a value must be are errors of ours."""
    with pytest.raises(IntegrityError):
        read_as_committed(data)


BIG = rows_of([TensorSpec("w", "float32", (3 << 22,)), TensorSpec("v", "bool", (3,))])
FIRST = row(box=Box((0, 0), (1, 3)), end=4096 + 12)
SECOND = row(box=Box((1, 0), (1, 3)), begin=4096 + 12)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([BIG[0], *BIG[2:]], "its regions leave a hole"),
        ([*rows_of([TensorSpec("w", "float32", (2,))])] * 2, ""),
        ([row(), row(tensor_shape=(4, 3))], "disagree"),
        ([FIRST, SECOND._replace(dtype="int32")], "disagree"),
        ([FIRST, BIG[-1]], ""),
        ([row(box=Box((1, 0), (2, 3))), BIG[-1]], ""),
    ],
    ids=["missing", "twice", "two shapes", "two dtypes", "only a part", "outside"],
)
def test_regions_that_are_not_their_tensor_are_named(rows: list[IndexRow], said: str) -> None:
    """P38, P47, P48: a region that is missing, there twice, outside, or of another shape or dtype is a named fault."""
    assert indexed(BIG).coverage_faults() == indexed([FIRST, SECOND]).coverage_faults() == []
    [fault] = indexed(rows).coverage_faults()
    assert fault.startswith("model/w: ")
    assert said in fault


def test_more_extents_than_are_read_are_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """P42: tensors of many dimensions take memory as many regions do."""
    data = write_index(Index.of([row(), row(key="v")]))
    for module in (index_module, columns):
        monkeypatch.setattr(module, "MAX_EXTENTS", 4)
    assert len(read_as_committed(data)) == 2
    for module in (index_module, columns):
        monkeypatch.setattr(module, "MAX_EXTENTS", 3)
    with pytest.raises(IntegrityError, match="more dimensions"):
        read_as_committed(data)
    with pytest.raises(UnsupportedStateError, match="4 extents"):
        write_index(Index.of([row(), row(key="v")]))


def with_words(words: list[str], codes: list[int]) -> bytes:
    """Write the index of two tensors whose objects are named by this dictionary."""
    table = table_of()
    at = table.schema.get_field_index("object")
    column = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), words)
    return written(table.set_column(at, table.schema.field(at), column))


def test_a_word_that_stands_twice_in_a_dictionary_is_one() -> None:
    """P49: the regions of one object are all seen, however Arrow numbers its name; other words are refused."""
    index = read_as_committed(with_words([PLACE, PLACE], [0, 1]))
    assert [found.object for found in index.rows] == [PLACE, PLACE]
    [fault] = index.object_faults({PLACE: (4096, 4120)})
    assert "gap, overlap or end elsewhere" in fault
    with pytest.raises(IntegrityError, match="words that no row has"):
        read_as_committed(with_words([PLACE, "b", "c"], [0, 0]))


@given(specs)
def test_a_part_of_an_index_is_found_by_tensor_or_object(wanted: list[TensorSpec]) -> None:
    """The rows of some tensors, or of one object, are those that a look at every row finds; parts make the whole."""
    other = PLACE.replace("model-", "other-")
    rows = [r._replace(object=other) if n % 3 == 0 else r for n, r in enumerate(rows_of(wanted))]
    index = indexed(rows)
    keys = {row.full_key for row in rows[::2]}
    assert [*index.of_tensors(keys).rows] == [row for row in rows if row.full_key in keys]
    parts = [index.of_object(name) for name in (other, PLACE, "no object")]
    assert [[*part.rows] for part in parts] == [
        [row for row in rows if row.object == name] for name in (other, PLACE, "no object")
    ]
    assert [*Index.joined(parts).rows] == sorted(rows, key=lambda row: row.object == PLACE)
    assert index.of_tensors(keys).tensors.keys() == keys


def test_regions_are_compared_but_for_their_object() -> None:
    """P47: a stored object is reused only where all is equal of every region: key, dtype, shapes, place and digest."""
    rows = [row(), row(key="v")]
    other = PLACE.replace("model-", "other-")
    index = Index.of(rows)
    assert index.same_regions(indexed([r._replace(object=other) for r in rows]))
    assert not index.same_regions(Index.of(rows[:1]))
    for changes in (
        {"group": "other"},
        {"key": "x"},
        {"dtype": "int32"},
        {"digest": b"1" * 16},
        {"begin": 0},
        {"end": 0},
        {"tensor_shape": (6,)},
        {"box": Box((1, 0), (2, 3))},
        {"box": Box((0, 0), (3, 2))},
    ):
        assert not index.same_regions(Index.of([rows[0], rows[1]._replace(**changes)]))
