"""Reading over S3 while answers are cut, torn, flipped or of yesterday: what is restored is what was saved."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_tasks.errors import FencedError, StoreError
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.run.ledger.history import History
from tests.faults.s3_runs import Place, commits, is_state, state_of
from tests.support import answers
from tests.support.ledgers import OTHER, commit, steps, take
from tests.support.rules import Fault

NEWEST = "/checkpoint_000000000003/"
# What is read on the way to a state, and which of the requests for it.
READS: dict[str, tuple[dict[str, str], int]] = {
    "list of entries": ({"operation": "ListObjects", "key": ""}, 0),
    "entry": ({"operation": "GetObject", "key": "/ledger/"}, 0),
    "manifest": ({"operation": "GetObject", "key": NEWEST + r".*manifest\.json$"}, 0),
    "region": ({"operation": "GetObject", "key": NEWEST + ".*weights-"}, 1),
}
CUTS = [
    *(Fault(reset_answer_at=20), Fault(truncate_answer_at=20), Fault(drop_answer=True), Fault(drop_request=True)),
    *(Fault(answer=answers.INTERNAL_ERROR), Fault(answer=answers.SLOW_DOWN), Fault(hold_answer=60.0)),
]


@pytest.fixture
def saved(place: Place) -> Place:
    """Return the place of a run of three checkpoints."""
    with place.run(storage_options=place.server.quick_options) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step))
    return place


def restored(place: Place, **config: Any) -> tuple[int, list[int]]:
    """Restore the newest good one; return its step, and the steps that were passed over."""
    state = state_of(0)
    with place.run(storage_options=place.options(**config)) as ckpt:
        step = ckpt.restore(state)
        assert is_state(state, step)
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.damaged == ()
        return step, [passed for passed, _ in ckpt.last_restore.skipped]


def test_a_read_that_breaks_off_is_made_again(saved: Place) -> None:
    """P43, P47, P54: answers that are reset, end early, never come or are errors: asked again, nothing is passed over.

    So it is for a listing, a ledger entry, a small object and a part of a large one. A newest checkpoint that cannot be
    reached is a StoreError, not the older one: the target is untouched, and later it works.
    """
    rules = [
        saved.chaos.on(cut, **match, skip=skip, times=1)
        for match, skip in READS.values()
        for cut in CUTS
        if not (match["operation"] == "ListObjects" and cut.truncate_answer_at)  # XML without its end is no listing
    ]
    assert restored(saved, read_timeout=0.4) == (3, [])
    assert [rule.hits for rule in rules] == [1] * len(rules)
    down = saved.chaos.on(Fault(drop_answer=True), operation="GetObject", key=NEWEST)
    state = state_of(7)
    with saved.run(deadline_s=0.2) as ckpt:
        with pytest.raises(StoreError, match="no answer from the store"):
            ckpt.restore(state)
        assert is_state(state, 7)
        saved.chaos.off(down)
        assert ckpt.restore(state) == 3
    assert is_state(state, 3)


def test_a_bit_that_flips_is_read_again(saved: Place) -> None:
    """P49: the digest sees a changed bit, and it is read again; if it stays so, the checkpoint is passed over."""
    for match, skip in (READS["manifest"], READS["region"]):
        rule = saved.chaos.on(Fault(flip_answer_at=20), **match, skip=skip, times=1)
        assert (restored(saved), rule.hits) == ((3, []), 1)
        rule = saved.chaos.on(Fault(flip_answer_at=20), **match, skip=skip)
        assert restored(saved) == (2, [3])
        assert 1 < rule.hits < 10
        saved.chaos.off(rule)


@pytest.fixture
def history(place: Place) -> History:
    """Return a ledger behind the proxy with three commits: entries 1 to 3."""
    found = place.history()
    for step in (1, 2, 3):
        commit(found, step)
    return found


@pytest.mark.parametrize("fault", [Fault(flip_answer_at=50), Fault(answer=answers.NO_SUCH_KEY)], ids=["bit", "gone"])
def test_a_newest_entry_that_is_misread_once_is_not_forgotten(place: Place, history: History, fault: Fault) -> None:
    """P49, P54, P60: a bit of it has changed, or it is listed and said not to exist: no commit is built without it."""
    place.chaos.on(fault, operation="GetObject", key=ledger_name(3), times=1)
    head = History(history.store).head()  # one that has not read the entry before
    assert (steps(head), head.damaged) == ([1, 2, 3], ())
    place.chaos.on(fault, operation="GetObject", key=ledger_name(3), times=1)
    commit(history, 4)
    assert steps(place.truth.head()) == [1, 2, 3, 4]


def test_a_commit_on_a_stale_listing_meets_an_entry_and_goes_on(place: Place, history: History) -> None:
    """P33, P54: the listing never shows what is new: the numbers that are met say more, and the commit goes on top.

    An owner that was taken over learns it from the number that it wants.
    """
    place.chaos.on(Fault(replay=True), operation="ListObjects")
    assert steps(history.head()) == [1, 2, 3]
    assert [commit(place.truth, step) for step in (4, 5)] == [4, 5]
    assert commit(history, 6) == 6
    take(place.truth, OTHER)
    with pytest.raises(FencedError, match="owner epoch 2"):
        commit(history, 7)
    assert steps(place.truth.head()) == commits(place.truth) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_listing_that_is_old_is_named(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """P54: a store that lists late does not fence its owner: entries are read by name, and one line says so."""
    with place.run() as ckpt:
        ckpt.save(1, state_of(1))
        place.chaos.on(Fault(replay=True), operation="ListObjects", query={"prefix": "ledger"})
        for step in (2, 3, 4):
            ckpt.save(step, state_of(step))
            assert ckpt.run.head().next_n == step + 1  # as the heartbeat asks
        place.chaos.off()
    assert sum("its listing lacks ledger entry" in record.getMessage() for record in caplog.records) == 1
    assert commits(place.truth) == [1, 2, 3, 4]
