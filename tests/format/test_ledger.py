"""The ledger as values: what each event does to the state, and which line is the run's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_tasks.format.ledger import State, lineage
from ckpt_tasks.format.records import Lease
from tests.support.ledgers import evaluation_of, made, owner_of

OWNER = owner_of(1)
NONE: frozenset[str] = frozenset()


def run_of(*commits: tuple[int, str | None]) -> State:
    """Commit (step, parent) one after the other: the n-th gets the identity "step@n"."""
    state = State()
    for n, (step, parent) in enumerate(commits, start=1):
        state = state.with_checkpoint(made(step, n, parent), NONE)
    return state


def names(state: State) -> list[str]:
    return [c.manifest_digest for c in lineage(state.live)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=12))
@example([(0, 9), (0, 10), (0, 100)])
@example([(0, 10), (0, 20), (1, 20), (1, 15)])  # a step once more, and then back to the line that was left
def test_the_line_of_the_last_commit_comes_first_and_is_never_abandoned(saves: list[tuple[int, int]]) -> None:
    """P32, P51, P53, P71: whatever the run goes back to: its present line, newest to oldest, then the other commits.

    A save is how many commits before the last one its parent is, and its step: no order follows from steps.
    """
    state = State()
    lines: dict[str, list[str]] = {}
    known: list[str] = []
    for n, (back, step) in enumerate(saves, start=1):
        parent = known[-1 - back % len(known)] if known else None
        checkpoint = made(step, n, parent)
        digest = checkpoint.manifest_digest
        lines[digest] = [digest, *(lines[parent] if parent else [])]
        state = state.with_checkpoint(checkpoint, NONE)
        known.append(digest)
        left = [one for one in reversed(known) if one not in lines[digest]]
        assert names(state) == lines[digest] + left
        assert {c.manifest_digest for c in state.live if c.abandoned} == {*left}


def test_what_stands_below_a_pruned_parent_keeps_its_mark() -> None:
    """P71: who belongs to the line below a gap is not known: what was abandoned stays so, and what was not, too."""
    state = run_of((10, None), (20, "10@1"), (15, "10@1")).retire(frozenset({"10@1"}), (), NONE)
    state = state.with_checkpoint(made(25, 4, "15@3"), NONE)
    assert [c.step for c in state.live if c.abandoned] == [20]
    state = run_of((10, None), (20, "10@1"), (30, "20@2")).retire(frozenset({"20@2"}), (), NONE)
    for parent in ("30@3", "gone"):
        assert not any(c.abandoned for c in state.with_checkpoint(made(40, 4, parent), NONE).live)


@pytest.mark.timeout(60)
def test_parents_in_a_circle_end() -> None:
    """P49: two checkpoints that each say that they came from the other are no line without end."""
    state = State(live=(made(1, 1, "2@2"), made(2, 2, "1@1")))
    assert names(state.with_checkpoint(made(3, 3, "2@2"), NONE)) == ["3@3", "2@2", "1@1"]


def test_what_is_retired_takes_its_facts_with_it() -> None:
    """P64, P65: pins, leases and evaluations of a retired checkpoint go; its objects stay named until deleted."""
    state = run_of((10, None), (20, "10@1")).with_pin("10@1", "mine").with_pin("20@2", "mine")
    for checkpoint in state.live:
        state = state.with_lease(lease(checkpoint.manifest_digest), 0.0).with_evaluation(evaluation_of(checkpoint))
    state = state.retire(frozenset({"10@1"}), ("a/x", "a/y"), NONE)
    assert [c.step for c in state.live] == [20]
    assert [*state.pins] == [x.manifest_digest for x in state.leases] == ["20@2"]
    assert [e.manifest_digest for e in state.evaluations] == ["20@2"]
    assert state.retired == ("a/x", "a/y")
    again = state.retire(NONE, ("a/y", "a/z"), frozenset({"a/x"}))
    assert again.retired == ("a/y", "a/z")
    assert state.with_checkpoint(made(30, 3, "20@2"), frozenset({"a/y"})).retired == ("a/x",)


def lease(digest: str, expires_at: float = 100.0, name: str = "") -> Lease:
    return Lease(id=name or f"lease of {digest}", manifest_digest=digest, holder="eval", expires_at=expires_at)


def test_leases_end_by_time_or_by_hand() -> None:
    """P64: a new lease drops those that have expired, replaces its own, and each can be given back."""
    state = State().with_lease(lease("a", 10.0), 0.0).with_lease(lease("b", 50.0), 20.0)
    assert [x.manifest_digest for x in state.leases] == ["b"]
    assert state.with_lease(lease("c", 90.0), 50.0).leases == (lease("c", 90.0),)
    state = state.with_lease(lease("b", 90.0), 20.0)
    assert [x.expires_at for x in state.leases] == [90.0]
    assert state.without_lease("lease of b").leases == ()


def test_owners_and_pins_come_and_go() -> None:
    """P62: the ranking stays when the next owner says nothing of it; who held it stays known, and a pin's reason."""
    state = State().with_owner(OWNER, "loss", "max").with_owner(OWNER, None, "min")
    assert (state.best_metric, state.best_mode) == ("loss", "max")
    assert state.released().owner == replace(OWNER, released=True)
    assert State().released() == State()
    state = State().with_pin("a", "one").with_pin("a", "two")
    assert state.pins == {"a": "two"}
    assert state.with_pin("a", None).with_pin("b", None).pins == {}


def test_stalled_attempts_count_per_flow_run_until_a_new_step() -> None:
    """P75: attempts of one flow run add up until it commits a new step; a save of an old step is not progress."""
    state = run_of((10, None)).with_owner(OWNER, None, "min").with_owner(OWNER, None, "min")
    assert state.stalled_attempts == 2
    assert state.with_stall("flow").stalled_attempts == 3
    assert state.with_stall("other").stalled_attempts == 1
    assert state.with_stall(None).with_stall(None).stalled_attempts == 1
    assert state.released().with_owner(OWNER, None, "min").stalled_attempts == 2  # a preemption is not a failure
    assert state.released().released().released().stalled_attempts == 0
    assert state.with_checkpoint(made(10, 2, "10@1"), NONE).stalled_attempts == 2
    assert state.with_checkpoint(made(11, 2, "10@1"), NONE).stalled_attempts == 0
    further = run_of((10, None), (20, "10@1")).with_owner(OWNER, None, "min")
    assert further.with_checkpoint(made(15, 3, "20@2"), NONE).stalled_attempts == 1  # its own parent counts
