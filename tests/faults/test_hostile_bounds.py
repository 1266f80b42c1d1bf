"""The bounds of what is read: they are what they say, no reader's recursion limit matters, and savers keep to them."""

from __future__ import annotations

import io
import json
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.copying.transfer import Transfer
from ckpt_tasks.errors import ConfigError, IntegrityError, StateError, UnsupportedStateError
from ckpt_tasks.format import manifest, parsing
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import MAX_EPOCH, MAX_FOLDED, MAX_LEDGER_NUMBER, ledger_name
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.manifest import Manifest, ObjectRecord
from ckpt_tasks.format.parsing import check_json, parse_json
from ckpt_tasks.format.tree import MAX_OF_ONE_HASH, decode, encode
from ckpt_tasks.layout import index
from ckpt_tasks.layout.arrow import FAULTS, read_arrow, write_metrics
from ckpt_tasks.layout.image import REGION_BYTES, TensorSpec, parse_header, plan_image
from ckpt_tasks.layout.index import Index, IndexRow, write_index
from ckpt_tasks.layout.regions import Box, blocks
from ckpt_tasks.policy.retention import Verdict
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store
from ckpt_tasks.upkeep.retiring import Retirement
from tests.support.indexes import indexed
from tests.support.ledgers import made_reusing

PLACE = "checkpoint_000000000005/e000001-0123456789abcdef/model-00000-of-00001-0.safetensors"
PRIME = 2**61 - 1  # the modulus of Python's hash of whole numbers

names = st.sampled_from(['"[', "a", '\\"{'])
documents = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(st.characters(codec="ascii") | st.sampled_from('[]{}",\\\\é'), max_size=6),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(names, inside, max_size=3),
    max_leaves=20,
)


def depth(value: Any) -> int:
    """Count the levels of lists and objects, the plain way."""
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


@given(documents, st.integers(0, 60))
def test_depth_is_counted_without_parsing(document: Any, deeper: int) -> None:
    """What is one level deeper than the bound is refused and what is not is parsed, whatever its texts hold."""
    for _ in range(deeper):
        document = [document]
    data, levels = json.dumps(document).encode(), max(depth(document), 40)
    assert parse_json(data, max_depth=levels) == document
    while depth(document) <= levels:
        document = {"[": document}
    with pytest.raises(ValueError, match="nested deeper"):
        check_json(json.dumps(document).encode(), max_depth=levels)


@given(documents)
def test_values_are_counted_without_parsing(document: Any) -> None:
    """Lists, objects and values are counted as they are, brackets and commas in texts are none."""
    data = json.dumps(document).encode()
    containers = sum(isinstance(value, dict | list) for value in every(document))
    with bounded(containers, 10**6):
        check_json(data)
    if containers:
        with bounded(containers - 1, 10**6), pytest.raises(ValueError, match="more than"):
            check_json(data)


def every(value: Any) -> Iterator[Any]:
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from every(item)


@contextmanager
def bounded(containers: int, values: int) -> Iterator[None]:
    before = parsing.MAX_CONTAINERS, parsing.MAX_VALUES
    parsing.MAX_CONTAINERS, parsing.MAX_VALUES = containers, values
    try:
        yield
    finally:
        parsing.MAX_CONTAINERS, parsing.MAX_VALUES = before


@pytest.mark.parametrize("text", [b"NaN", b"-Infinity", b'{"a":Infinity}', b"\xff", b'"\xc3\xa4"', b"1" * 4301])
def test_what_is_no_json_of_ours_is_refused(text: bytes) -> None:
    """NaN and infinities, bytes outside of ASCII and numbers without end are a ValueError."""
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)


def test_numbers_without_end_are_refused_whatever_the_process_allows() -> None:
    """Who lifts Python's limit on digits does not make a reader spend the square of their number."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        assert parse_json(b"12") == 12
        with pytest.raises(ValueError, match="whole number of 5000 digits"):
            parse_json(b"[" + b"9" * 5000 + b"]")
    finally:
        sys.set_int_max_str_digits(before)


# ── savers keep to what readers take ─────────────────────────────────────────────────────────────────────────


def manifest_of(groups: dict[str, Any]) -> Manifest:
    record = ObjectRecord(PLACE.replace("model-00000-of-00001-0.safetensors", "index.arrow"), 1, "f" * 32, 1)
    fields: dict[str, Any] = {"run_key": "lm", "step": 5, "attempt": "e000001-0123456789abcdef", "world_size": 1}
    return Manifest(**fields, index=record, objects=(), groups=groups)


def test_a_manifest_that_could_not_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """P42: too many groups or values are refused when saving, with what to do."""
    monkeypatch.setattr(manifest, "MAX_GROUPS", 2)
    with pytest.raises(UnsupportedStateError, match="3 groups"):
        manifest_of({name: {"kind": "plain", "tree": 1} for name in "abc"}).to_bytes()
    with bounded(100, 10**6), pytest.raises(UnsupportedStateError, match="Keep large values in tensors"):
        manifest_of({"a": {"kind": "plain", "tree": [[]] * 100}}).to_bytes()


def test_an_index_that_could_not_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """P42: more regions than are read are refused when saving."""
    monkeypatch.setattr(index, "MAX_REGIONS", 2)
    with pytest.raises(UnsupportedStateError, match="3 regions"):
        write_index(Index.of([row_of("w", (2,), 0)] * 3))


@pytest.mark.parametrize("levels", [120, 5000])
def test_an_event_that_could_not_be_read_is_not_put(levels: int) -> None:
    """P42: what people note may nest, but not deeper than is read."""
    note: Any = 1
    for _ in range(levels):
        note = [note]
    event = {"kind": "note", "note": "x", "more": note}
    with pytest.raises(StateError, match="could not be read back"):
        Entry(n=0, epoch=0, nonce="", previous=None, at="", event=event, state=State()).to_bytes()


def test_numbers_that_are_used_up_are_said() -> None:
    """The last ledger number and the last owner epoch are the last: the error says to use another directory."""
    assert ledger_name(MAX_LEDGER_NUMBER).startswith("ledger/00000000000000000000-9999")
    with pytest.raises(ConfigError, match="another directory"):
        ledger_name(MAX_LEDGER_NUMBER + 1)
    from tests.support.ledgers import owner_of

    with pytest.raises(ConfigError, match="another directory"):
        State().with_owner(owner_of(MAX_EPOCH + 1), None, "min")


@pytest.mark.parametrize(("make", "tag"), [(dict.fromkeys, "~dict"), (set, "~set"), (frozenset, "~frozenset")])
def test_keys_of_one_hash_are_refused_both_ways(make: Any, tag: str) -> None:
    """P42: a few keys of one hash come back; what would take the square of their number is refused, read or written."""
    few, many = ([n * PRIME for n in range(1, count + 1)] for count in (MAX_OF_ONE_HASH, MAX_OF_ONE_HASH + 1))
    assert decode(json.loads(json.dumps(encode(make(few))))) == make(few)
    with pytest.raises(UnsupportedStateError, match="one hash"):
        encode(make(many), "extra")
    with pytest.raises(IntegrityError, match="one hash"):
        decode({tag: [[n, None] for n in many] if tag == "~dict" else many})


# ── Arrow ────────────────────────────────────────────────────────────────────────────────────────────────────


def rewritten(data: bytes, **options: Any) -> bytes:
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_tables_are_refused(codec: str) -> None:
    """A table of metrics is read uncompressed only: its size says what it takes in memory."""
    data = write_metrics({f"metric{n}": 0.5 for n in range(1000)}, {"step": "1"})
    schema = pa.schema(
        [pa.field("metric", pa.string(), nullable=False), pa.field("value", pa.float64(), nullable=False)]
    )
    plain = pa.table({"metric": [f"metric{n}" for n in range(1000)], "value": [0.5] * 1000}, schema=schema)
    assert all(read_arrow(one, schema, 1000).equals(plain) for one in (data, rewritten(data)))
    with pytest.raises(FAULTS, match="compressed buffers are not read"):
        read_arrow(rewritten(data, compression=codec), schema, 1000)


def test_more_rows_than_asked_for_are_refused() -> None:
    """The bound on rows holds before a Python object is made of any."""
    table = pa.table({"a": [1, 2, 3]})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert read_arrow(sink.getvalue(), table.schema, 3).num_rows == 3
    with pytest.raises(FAULTS, match="3 rows, more than 2"):
        read_arrow(sink.getvalue(), table.schema, 2)


# ── regions and headers ──────────────────────────────────────────────────────────────────────────────────────


def row_of(key: str, shape: tuple[int, ...], begin: int, box: Box | None = None) -> IndexRow:
    box = box or Box((0,) * len(shape), shape)
    return IndexRow("model", key, "float32", shape, box, PLACE, begin, begin + 4 * box.size, b"0" * 16)


@given(st.lists(st.integers(1, 6), max_size=3), st.integers(1, 9), st.integers(-2, 2))
def test_what_blocks_makes_is_always_read(lead: list[int], part: int, more: int) -> None:
    """P38: whatever a tensor's shape is, its regions as they are cut are as few as a reader allows, and in order."""
    shape = (*lead, 3 * (REGION_BYTES // 4) // part + more)
    rows, begin = [], 4096
    for box in blocks(shape, REGION_BYTES // 4):
        rows.append(row_of("w", shape, begin, box))
        begin = rows[-1].end
    index = indexed(rows)
    assert index.coverage_faults() == []
    assert index.object_faults({PLACE: (4096, begin)}) == []


def test_regions_fill_their_object() -> None:
    """A gap, an overlap, an end that is elsewhere, and an object that nobody named are each a fault."""
    rows = [row_of("v", (4,), 4096), row_of("w", (2,), 4112)]
    index = indexed(rows)
    assert index.object_faults({PLACE: (4096, 4120)}) == []
    for begin, end in ((4092, 4120), (4096, 4124), (4096, 4116)):
        assert "gap, overlap or end elsewhere" in index.object_faults({PLACE: (begin, end)})[0]
    assert "gap, overlap" in indexed([rows[0], rows[0]]).object_faults({PLACE: (4096, 4128)})[0]
    assert "does not name" in index.object_faults({})[0]


def test_regions_in_another_order_than_their_elements_are_a_fault() -> None:
    """Bytes that are read in one go must be the elements in their order."""
    halves = [row_of("w", (4,), 4104, Box((0,), (2,))), row_of("w", (4,), 4096, Box((2,), (2,)))]
    assert indexed(halves).coverage_faults() == ["model/w: its regions do not lie in the order of its elements"]


def test_a_header_whose_tensor_has_other_bytes_is_refused() -> None:
    """A tensor's dtype and shape say how many bytes it has, whatever they overflow to elsewhere."""
    layout = plan_image([TensorSpec("w", "float32", (2, 3)), TensorSpec("v", "complex128", (2,))])
    assert {*parse_header(layout.header, layout.size_bytes)} == {"w", "v"}
    for old, new in ((b"[2,3]", b"[2,4]"), (b"[2,3]", b"[-2,-3]"), (b'"F32"', b'"F16"'), (b'"F32"', b'"X99"')):
        header = layout.header.replace(old, new)
        header = header[:-1] if len(header) > len(layout.header) else header
        with pytest.raises(IntegrityError):
            parse_header(header[: len(layout.header)], layout.size_bytes)
    assert digest_hex(layout.header)


# ── folded names ─────────────────────────────────────────────────────────────────────────────────────────────


def reusing(*reuses: str) -> State:
    """Return a state with a checkpoint for each of these folded names, as an entry holds it that can be read."""
    return written(State(live=tuple(made_reusing(n, (name,)) for n, name in enumerate(reuses))))


def written(state: State) -> State:
    """Write a state into an entry and read it."""
    entry = Entry(n=9999, epoch=1, nonce="a", previous=None, at="", event={"kind": "retire"}, state=state)
    return Entry.from_bytes(entry.to_bytes()[0], ledger_name(entry.n))[0].state


def folded(last: int, group: str = "base") -> str:
    return f"checkpoint_000000000000/e000001-{0:016x}/{group}-[0-{last}]-of-99999999-0.safetensors"


def removing(store: Store, state: State) -> Retirement:
    """Return what removes all checkpoints but the newest."""
    going = frozenset(c.manifest_digest for c in state.live[:-1])
    return Retirement(
        store,
        state,
        lambda now: [Verdict(c.step, c.manifest_digest, c.manifest_digest not in going, ()) for c in now.live],
        frozenset(),
    )


def test_names_that_many_checkpoints_reuse_are_unfolded_once(tmp_path: Path) -> None:
    """P42: a prune and a copy take memory for the different names of an entry, not for those of each checkpoint."""
    (tmp_path / "run").mkdir()
    store = LocalStore(tmp_path / "run")
    state = reusing(*(folded(2000 + n) for n in range(300)), folded(3000, "other"))
    tracemalloc.start()
    try:
        retirement = removing(store, state)
        assert retirement.apply(state).live == state.live[-1:]
        assert len(retirement.given_up) == 2300
        with Transfer(store, store, state, lambda size_bytes: None):
            pass
        assert tracemalloc.get_traced_memory()[1] < 30 << 20  # 300 times 2,150 names take 80 MiB and more
    finally:
        tracemalloc.stop()


def test_more_names_than_an_entry_may_give_up_go_in_turns(tmp_path: Path) -> None:
    """P42: of what a prune removes as much goes as an entry can list; the rest stays, and no commit fails of it."""
    (tmp_path / "run").mkdir()
    store = LocalStore(tmp_path / "run")
    waiting = (*(folded(MAX_FOLDED - 1, f"old{n}") for n in range(3)), folded(MAX_FOLDED - 6, "old3"))
    state = replace(reusing(folded(1, "a"), folded(2, "b"), folded(1, "c"), folded(1, "d")), retired=waiting)
    retirement = removing(store, state)
    after = retirement.apply(state)
    assert after.live == state.live[2:]
    assert len(retirement.given_up) == 5
    assert written(after) == after
    assert removing(store, after).apply(after) == after  # there is no room until some of them are deleted
    with pytest.raises(StateError, match="more than 4194304 objects"):
        written(replace(state, retired=(*waiting, *map(folded, range(4, 8)))))
