"""The index of a lookup table's rows: a hash table that looks up a batch at once is a dict, whatever is asked of it."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_tasks.state.tables.row_index import RowIndex

IDS = st.sets(st.integers(-3, 60) | st.sampled_from([2**63 - 1, -(2**63)]), max_size=40)
CHANGES = st.lists(st.tuples(st.booleans(), IDS), max_size=12)
# Half of the slots, again and again, beside an id that stays: if deleted slots did not count, the search for an id
# without a row would not end.
CHURN = [(True, {-1}), *((adds, {*range(7 * turn, 7 * turn + 7)}) for turn in range(12) for adds in (True, False))]


@given(CHANGES, st.integers(1, 6))
@example(CHURN, 4)
@example([(True, set(range(40))), (False, set(range(0, 40, 2))), (True, set(range(60)))], 1)
def test_it_is_a_dict(changes: list[tuple[bool, set[int]]], bits: int) -> None:
    """After any additions and deletions each id has its row, no other id has one, and so in a table that is crowded."""
    index, known, held = RowIndex(bits), dict[int, int](), np.zeros(4096, np.int64)
    free = iter(range(len(held)))
    for adds, ids in changes:
        asked = np.array(sorted(ids), np.int64)
        expected = [known.get(one, -1) for one in asked.tolist()]
        assert index.find(asked, held).tolist() == expected
        if adds:
            new = asked[[place < 0 for place in expected]]
            places = np.array([next(free) for _ in new], np.int64)
            held[places] = new
            index.add(new, places, held)
            known.update(zip(new.tolist(), places.tolist(), strict=True))
        else:
            assert index.remove(asked, held).tolist() == expected
            known = {one: place for one, place in known.items() if one not in ids}
        assert index.find(np.array([*known], np.int64), held).tolist() == [*known.values()]
        assert (index.count, index.places.tolist()) == (len(known), sorted(known.values()))
