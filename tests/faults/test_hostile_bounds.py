"""The bounds of what is read: they are what they say, and savers keep to them."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.checkpoint.transfer.transfer import Transfer
from ckpt_tasks.errors import ConfigError, IntegrityError, StateError, UnsupportedStateError
from ckpt_tasks.format.keys import MAX_EPOCH, MAX_FOLDED, MAX_LEDGER_NUMBER, ledger_name
from ckpt_tasks.format.layout.image import REGION_BYTES
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.format.layout.regions import Box, blocks
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.policy.retention import Verdict
from ckpt_tasks.format.tree import MAX_OF_ONE_HASH, decode, encode
from ckpt_tasks.run.upkeep.retiring import Retirement
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store
from tests.support.indexes import indexed
from tests.support.ledgers import made_reusing, owner_of

PLACE = "checkpoint_000000000005/e000001-0123456789abcdef/model-00000-of-00001-0.safetensors"
PRIME = 2**61 - 1  # the modulus of Python's hash of whole numbers


def test_numbers_that_are_used_up_are_said() -> None:
    """The last ledger number and the last owner epoch are the last: the error says to use another directory."""
    assert ledger_name(MAX_LEDGER_NUMBER)
    with pytest.raises(ConfigError, match="another directory"):
        ledger_name(MAX_LEDGER_NUMBER + 1)
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


# ── regions and headers ──────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(1, 6), max_size=3), st.integers(1, 9), st.integers(-2, 2))
def test_what_blocks_makes_is_always_read(lead: list[int], part: int, more: int) -> None:
    """P38: whatever a tensor's shape is, its regions as they are cut are as few as a reader allows, and in order."""
    shape = (*lead, 3 * (REGION_BYTES // 4) // part + more)
    rows, begin = [], 4096
    for box in blocks(shape, REGION_BYTES // 4):
        end = begin + 4 * box.size
        rows.append(IndexRow("model", "w", "float32", shape, box, PLACE, begin, end, b"0" * 16))
        begin = end
    index = indexed(rows)
    assert index.coverage_faults() == []
    assert index.object_faults({PLACE: (4096, begin)}) == []


def test_regions_fill_their_object() -> None:
    """P42: a gap, an overlap, an end that is elsewhere, and an object that nobody named are each a fault."""
    whole = Box((0,), (4,))
    one, other = (
        IndexRow("model", key, "float32", (4,), whole, PLACE, begin, begin + 16, b"0" * 16)
        for key, begin in (("v", 4096), ("w", 4112))
    )
    assert indexed([one, other]).object_faults({PLACE: (4096, 4128)}) == []
    for begin, end in ((4092, 4128), (4096, 4132), (4096, 4124)):
        assert "gap, overlap or end elsewhere" in indexed([one, other]).object_faults({PLACE: (begin, end)})[0]
    assert "gap, overlap" in indexed([one, one]).object_faults({PLACE: (4096, 4128)})[0]
    assert "does not name" in indexed([one]).object_faults({})[0]


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
