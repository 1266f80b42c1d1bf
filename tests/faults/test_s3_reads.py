"""Reading over S3 while answers are cut, torn, flipped or of yesterday: what is restored is what was saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import FencedError, StoreError
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.ledger.history import History
from ckpt_tasks.storage.locations import Location
from tests.faults.s3_runs import Place, commits, is_state, state_of
from tests.servers.process import token
from tests.servers.s3 import S3Server
from tests.support import answers
from tests.support.ledgers import OTHER, commit, steps, take
from tests.support.rules import Fault, Gate

NEWEST = "/checkpoint_000000000003/"
# What is read of a checkpoint, and which of the requests for it.
READS: dict[str, tuple[str, int]] = {
    "manifest": (r"manifest\.json$", 0),
    "index": (r"index\.arrow$", 0),
    "header": (r"weights-", 0),
    "region": (r"weights-", 1),
}
CUTS = [
    Fault(reset_answer_at=20),
    Fault(truncate_answer_at=20),
    Fault(drop_answer=True),
    Fault(drop_request=True),
    Fault(answer=answers.INTERNAL_ERROR),
    Fault(answer=answers.SLOW_DOWN),
]


@pytest.fixture(scope="module")
def trained(ministack: S3Server, common_bucket: str) -> str:
    """Return the prefix of a run of three checkpoints; restoring from it adds nothing but owners and notes."""
    prefix = token()
    location = Location(f"s3://{common_bucket}/{prefix}", storage_options=ministack.quick_options)
    with Checkpointer(CheckpointConfig(checkpoint_dir=location, max_num_checkpoints=None, memory_dir=None)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step))
    return prefix


@pytest.fixture
def saved(place: Place, trained: str) -> Place:
    """Return the place of that run."""
    return replace(place, prefix=trained)


def restored(place: Place, **more: Any) -> tuple[int, list[int], dict[str, Any]]:
    """Restore the newest good one: its step, the steps that were passed over, and the state."""
    state = state_of(0)
    with place.run(**more) as ckpt:
        step = ckpt.restore(state)
        assert ckpt.last_restore is not None
        return step, [passed for passed, _ in ckpt.last_restore.skipped], state


# ── a checkpoint ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", READS)
def test_a_read_that_breaks_off_is_made_again(saved: Place, what: str) -> None:
    """P47: connections that are reset, answers that end too early, errors: read again, and nothing is passed over."""
    key, skip = READS[what]
    match = {"operation": "GetObject", "key": NEWEST + ".*" + key}
    rules = [saved.chaos.on(cut, **match, skip=skip, times=1) for cut in CUTS]
    step, passed, state = restored(saved)
    assert (step, passed, [rule.hits for rule in rules]) == (3, [], [1] * len(CUTS))
    assert is_state(state, 3)


ONCE = [pytest.param(what, 1, marks=pytest.mark.slow if at else ()) for at, what in enumerate(READS)]


@pytest.mark.parametrize(("what", "times"), [*ONCE, *((what, None) for what in READS)])
def test_a_bit_that_flips_is_read_again(saved: Place, what: str, times: int | None) -> None:
    """P49: the digest sees a changed bit, and it is read again; if it stays so, the checkpoint is passed over."""
    key, skip = READS[what]
    flip = Fault(flip_answer_at=20)
    rule = saved.chaos.on(flip, operation="GetObject", key=NEWEST + ".*" + key, skip=skip, times=times)
    step, passed, state = restored(saved)
    assert (step, passed) == ((3, []) if times else (2, [3]))
    assert rule.hits == 1 if times else 1 < rule.hits < 10
    assert is_state(state, step)


def test_a_store_that_fails_is_no_damaged_checkpoint(saved: Place) -> None:
    """P47: the newest cannot be reached: a StoreError, not the older one; the target is untouched; later it works."""
    down = saved.chaos.on(Fault(drop_answer=True), operation="GetObject", key=NEWEST)
    state = state_of(7)
    with saved.run(deadline_s=0.2) as ckpt:
        with pytest.raises(StoreError, match="no answer from the store"):
            ckpt.restore(state)
        assert is_state(state, 7)
        saved.chaos.off(down)
        assert ckpt.restore(state) == 3
    assert is_state(state, 3)


def test_a_read_that_stalls_is_noticed(saved: Place) -> None:
    """P43: an answer that never comes is given up after the read timeout, and asked for again."""
    never = Gate()
    rule = saved.chaos.on(Fault(hold_answer=never), operation="GetObject", key=NEWEST, times=2)
    options = saved.options(read_timeout=0.4)
    step, passed, state = restored(saved, storage_options=options)
    assert (step, passed, rule.hits) == (3, [], 2)
    assert is_state(state, 3)


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def history(place: Place) -> History:
    """Return a ledger behind the proxy with three commits: entries 1 to 3."""
    found = place.history()
    for step in (1, 2, 3):
        commit(found, step)
    return found


@pytest.mark.parametrize("operation", ["GetObject", "ListObjects"])
def test_the_newest_entry_is_found_through_cut_answers(place: Place, history: History, operation: str) -> None:
    """P54: broken listings and reads of the ledger are made again; the head is the newest one."""
    rules = [place.chaos.on(cut, operation=operation, times=1) for cut in CUTS]
    head = History(history.store).head()  # one that has not read the entry before
    assert [rule.hits for rule in rules] == [1] * len(CUTS)
    assert [one.step for one in head.state.live] == [1, 2, 3]
    assert head.damaged == ()


@pytest.mark.parametrize("fault", [Fault(flip_answer_at=50), Fault(answer=answers.NO_SUCH_KEY)], ids=["bit", "gone"])
def test_a_newest_entry_that_is_misread_once_is_not_forgotten(place: Place, history: History, fault: Fault) -> None:
    """P49, P54, P60: a bit of it has changed, or it is listed and said not to exist: no commit is built without it."""
    place.chaos.on(fault, operation="GetObject", key=ledger_name(3), times=1)
    head = History(history.store).head()  # one that has not read the entry before
    assert (steps(head), head.damaged) == ([1, 2, 3], ())
    place.chaos.on(fault, operation="GetObject", key=ledger_name(3), times=1)
    commit(history, 4)
    assert steps(place.truth.head()) == [1, 2, 3, 4]


# ── listings of yesterday ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("times", [2, None], ids=["twice", "always"])
def test_a_commit_on_a_stale_listing_meets_an_entry_and_goes_on(
    place: Place, history: History, times: int | None
) -> None:
    """P54, P33: the listing hides two entries: their numbers are taken, both are read, and the commit goes on top.

    Where it never shows what is new, the numbers that were met say more than the listing.
    """
    place.chaos.on(Fault(replay=True), operation="ListObjects", times=times and 1 + times)
    assert steps(history.head()) == [1, 2, 3]
    assert [commit(place.truth, step) for step in (4, 5)] == [4, 5]
    assert commit(history, 6) == 6
    assert steps(place.truth.head()) == commits(place.truth) == [1, 2, 3, 4, 5, 6]


def test_a_reader_of_a_stale_listing_sees_an_older_state(place: Place) -> None:
    """P54: never an error: what the listing shows is a state that the run was in, and can be restored."""
    past: dict[str, Any] = {"storage_options": place.server.quick_options}
    with place.run(**past) as ckpt:
        ckpt.save(3, state_of(3))
        run = open_run(Location(place.url, storage_options=place.options()))
        place.chaos.on(Fault(replay=True), operation="ListObjects")
        assert [one.step for one in run.checkpoints()] == [3]
        ckpt.save(4, state_of(4))
    assert [one.step for one in run.checkpoints()] == [3]
    state = {"weights": state_of(0)["weights"]}
    run.restore(run.find("latest"), state, partial=True)
    assert float(state["weights"][0]) == 3
    place.chaos.off()
    assert [one.step for one in run.checkpoints()] == [4, 3]


def test_a_zombie_with_a_stale_listing_is_fenced_all_the_same(place: Place, history: History) -> None:
    """P33, P54: the listing still shows the zombie as owner: the number that it wants is taken, and that tells it."""
    place.chaos.on(Fault(replay=True), operation="ListObjects", times=2)
    assert steps(history.head()) == [1, 2, 3]
    take(place.truth, OTHER)
    with pytest.raises(FencedError, match="owner epoch 2"):
        commit(history, 4)
    assert commits(place.truth) == [1, 2, 3]
