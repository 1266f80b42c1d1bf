"""format/keys.py: names of many ranks as one, and back; what is in it is known without unfolding."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import MAX_FOLDED, Names, fold, is_folded, ledger_name, repeated, unfold
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.live import read_segment, write_segment
from tests.support.ledgers import made_reusing

PLACE = "checkpoint_000000000001/e000001-9d30edd20d094bd9/"


def shard(rank: int, group: str = "base", size: int = 9, part: int = 0) -> str:
    return f"{PLACE}{group}-{rank:05d}-of-{size:05d}-{part}.safetensors"


SHARDS = st.builds(shard, st.integers(0, 12), st.sampled_from(["base", "a"]), st.sampled_from([9, 13]))
OTHERS = st.sampled_from([f"{PLACE}manifest.json", f"{PLACE}base-000000001-of-00009-0.safetensors", "x", "evals/y"])
NAMES = st.lists(SHARDS | OTHERS)


@given(NAMES, NAMES)
def test_folding_loses_nothing(some: list[str], more: list[str]) -> None:
    """Folded names are the same set, in one way to write it, and a later one is added as to a set."""
    folded = fold(some)
    assert {*unfold(folded)} == {*some}
    assert len([*unfold(folded)]) == len({*some})
    assert fold(folded) == folded
    assert fold((*folded, *more)) == fold([*some, *more])
    known = Names(folded)
    assert all((name in known) == (name in some) for name in [*some, *more, shard(99), "", PLACE])


@given(st.lists(NAMES, max_size=4))
def test_names_in_more_than_one_set(sets: list[list[str]]) -> None:
    """What several sets have in common is found without unfolding, and is folded."""
    counts = Counter(name for names in sets for name in {*names})
    common = repeated(map(fold, sets))
    assert {*unfold(common)} == {name for name, count in counts.items() if count > 1}
    assert fold(common) == common


@pytest.mark.parametrize(
    "ranks", ["", "0", "1,0", "0-1,2", "0-0", "5-2", "00-1", "0,0", "0-1,1-2", f"0-{MAX_FOLDED}", "-1", "0-1000000000"]
)
def test_there_is_one_way_to_write_it(ranks: str) -> None:
    """P42: a name that stands for none or too many, or is written in another way, is refused."""
    assert not is_folded(f"{PLACE}base-[{ranks}]-of-00009-0.safetensors")
    assert is_folded(f"{PLACE}base-[0-1,3]-of-00009-0.safetensors")
    assert not is_folded("../base-[0-1,3]-of-00009-0.safetensors")


def entry_of(ranks: int, *, live: int = 20, folded: bool = True) -> Entry:
    """Return an entry in which every live checkpoint reuses an object of every rank, and as many are retired."""
    names, gone = ([shard(rank, group, ranks) for rank in range(ranks)] for group in ("base", "gone"))
    state = State(live=tuple(made_reusing(n, fold(names) if folded else tuple(names)) for n in range(2, 2 + live)))
    state = state.retire(frozenset(), tuple(gone), frozenset()) if folded else state
    event = {"kind": "commit", "step": 1 + live}
    return Entry(n=live + 9, epoch=1, nonce="a", previous=None, at="", event=event, state=state)


def test_an_entry_is_as_long_for_a_thousand_ranks_as_for_ten() -> None:
    """P26: with reuse, an entry grows by the digits of the ranks alone; by names it had 1.7 MiB."""
    small, large, named = (entry_of(10), entry_of(1000), entry_of(1000, folded=False))
    sizes = [len(entry.to_bytes()[0]) for entry in (small, large, named)]
    assert sizes[1] < sizes[0] + 21 * 4
    assert sizes[2] > 1.5 * 2**20 > 100 * sizes[1]


def test_folded_and_single_names_are_read() -> None:
    """P59: an entry and a segment with folded names, and with single ones, are read as they were written."""
    for folded in (True, False):
        entry = entry_of(5, folded=folded)
        data, _ = entry.to_bytes()
        assert Entry.from_bytes(data, ledger_name(entry.n))[0] == entry
        assert entry.state.keeps(shard(4, "base", 5))
        assert not entry.state.keeps(shard(5, "base", 5))
        segment = write_segment(entry.state.live)
        assert read_segment(segment, digest=digest_hex(segment), name="x") == entry.state.live


def test_what_is_deleted_leaves_the_folded_names() -> None:
    """Of retired objects of many ranks those that are gone are struck off, one by one."""
    state = entry_of(4).state
    assert state.has_retired(shard(2, "gone", 4))
    left = state.without_deleted(frozenset({shard(0, "gone", 4), shard(2, "gone", 4)}))
    assert [*unfold(left.retired)] == [shard(1, "gone", 4), shard(3, "gone", 4)]
    assert not left.has_retired(shard(2, "gone", 4))
    assert replace(left, retired=()).without_deleted(frozenset({"x"})).retired == ()
