"""The ledger as values: what each event does to the state, which line is the run's, and what bytes are an entry."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_tasks.errors import CkptError, FormatVersionError, IntegrityError, StateError
from ckpt_tasks.format.keys import MAX_EPOCH, MAX_LEDGER_NUMBER
from ckpt_tasks.format.ledger import Entry, State, lineage
from ckpt_tasks.format.records import Lease
from ckpt_tasks.format.versions import TABLES_VERSION
from tests.support.ledgers import evaluation_of, made, owner_of, resealed

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
    state = state.with_checkpoint(made(40, 4, "30@3"), NONE)
    assert not any(c.abandoned for c in state.live)


@pytest.mark.timeout(60)
def test_parents_in_a_circle_end() -> None:
    """P49: two checkpoints that each say that they came from the other are no line without end."""
    state = State(live=(made(1, 1, "2@2"), made(2, 2, "1@1")))
    assert names(state.with_checkpoint(made(3, 3, "2@2"), NONE)) == ["3@3", "2@2", "1@1"]


def test_a_save_without_a_parent_leaves_marks_alone() -> None:
    """A checkpoint that came from nowhere (a parent that is unknown) marks nothing as abandoned."""
    state = run_of((10, None), (20, "10@1"))
    assert not any(c.abandoned for c in state.with_checkpoint(made(30, 3, "gone"), NONE).live)


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


def test_pins_come_and_go() -> None:
    """A pin holds its reason; unpinning what is not pinned is not an error."""
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


def test_an_owner_says_what_best_means_only_if_it_knows() -> None:
    """P62: the ranking of a run stays when the next owner says nothing about it."""
    state = State().with_owner(OWNER, "loss", "max").with_owner(OWNER, None, "min")
    assert (state.best_metric, state.best_mode) == ("loss", "max")


def test_releasing_keeps_who_it_was() -> None:
    """A released directory still says who held it, so that epochs go on growing."""
    released = State().with_owner(OWNER, None, "min").released().owner
    assert released == replace(OWNER, released=True)
    assert State().released() == State()


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────


def entry(state: State, **more: Any) -> Entry:
    fields: dict[str, Any] = {
        "n": 3,
        "epoch": 1,
        "nonce": "c" * 32,
        "previous": None,
        "at": "2024",
        "event": {"kind": "note"},
    }
    return Entry(**{**fields, **more}, state=state)


FULL = (
    run_of((10, None), (20, "10@1"))
    .with_owner(OWNER, "loss", "min")
    .with_pin("10@1", "mine")
    .with_lease(lease("20@2"), 0.0)
    .retire(NONE, ("checkpoint_000000000001/e000001-0123456789abcdef/index.arrow",), NONE)
)


def test_a_changed_byte_is_found_and_another_layout_is_read() -> None:
    """The digest covers every byte, whether it is checked on the bytes or on the parsed entry written anew."""
    data, digest = entry(FULL).to_bytes()
    for n in range(len(data)):
        with pytest.raises((IntegrityError, FormatVersionError)):
            Entry.from_bytes(data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :], "x")
    other = json.dumps(json.loads(data), indent=1).encode()
    assert Entry.from_bytes(other, "x") == (entry(FULL), digest)
    with pytest.raises(IntegrityError):
        Entry.from_bytes(other.replace(b'"mine"', b'"ours"'), "x")


def test_a_look_reads_the_newest_checkpoints() -> None:
    """With `newest` an entry lacks older checkpoints and says so."""
    data, digest = entry(FULL).to_bytes()
    found, its = Entry.from_bytes(data, "x", 1)
    assert ([one.step for one in found.state.live], found.partial, its) == ([20], True, digest)
    assert Entry.from_bytes(data, "x", 2) == (entry(FULL), digest)


def test_an_entry_comes_back_equal() -> None:
    """A state with everything in it is read back equal, with the digest that the next entry names."""
    data, digest = entry(FULL).to_bytes()
    assert Entry.from_bytes(data, "x") == (entry(FULL), digest)


@given(
    st.dictionaries(st.text(max_size=4), st.floats(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.floats() | st.text() | st.lists(st.floats(), max_size=2), max_size=3),
)
def test_numbers_that_json_lacks_come_back(metrics: dict[str, float], fields: dict[str, Any]) -> None:
    """P62: NaN and infinity in metrics, and in what an event tells, are written as JSON that everyone reads."""
    checkpoint = made(1, 1, metrics=metrics)
    state = State().with_checkpoint(checkpoint, NONE).with_evaluation(evaluation_of(checkpoint, loss=float("nan")))
    data, _ = entry(state, event={**fields, "kind": "note"}).to_bytes()
    json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again, _ = Entry.from_bytes(data, "x")
    assert repr(again.state.live[0].metrics) == repr({k: metrics[k] for k in sorted(metrics)})
    assert repr(again.state.evaluations[0].metrics["loss"]) == "nan"


def sealed(change: Any) -> bytes:
    return resealed(entry(FULL).to_bytes()[0], change)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(version=TABLES_VERSION + 1),
        lambda body: body["event"].update(kind="teleport"),
        lambda body: body["event"].update(kind=["note"]),
    ],
)
def test_a_newer_entry_is_refused_and_never_passed_over(change: Any) -> None:
    """P59: a newer version or an unknown event is not damage: the reader stops and says upgrade."""
    with pytest.raises(FormatVersionError, match="Upgrade"):
        Entry.from_bytes(sealed(change), "x")


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["state"].update(retired=["../../etc/passwd"]),
        lambda body: body["state"].update(retired=[3]),
        lambda body: body["state"]["live"][0].update(manifest="simplecache::http://host/x"),
        lambda body: body["state"]["live"][0].update(manifest="../x"),
        lambda body: body["state"].update(live={"object": "../x", "digest": "f"}),
        lambda body: body["state"].update(live={"object": "file:///x", "digest": "f"}),
        lambda body: body["state"].update(live={"digest": "f"}),
        lambda body: body["state"]["live"][0].update(metrics={"loss": 10**400}),
        lambda body: body["state"]["live"][0].update(more=1),
        lambda body: body["state"]["owner"].pop("epoch"),
        lambda body: body["state"].update(owner=[1]),
        lambda body: body.update(state=[]),
        lambda body: body.update(event=[]),
        lambda body: body.update(version=None),
        lambda body: body.pop("nonce"),
        lambda body: body["state"].update(best_mode="median"),
        *(
            lambda body, name=name, value=value: body.update({name: value})
            for name, most in (("n", MAX_LEDGER_NUMBER), ("epoch", MAX_EPOCH))
            for value in (-1, True, "3", 3.0, None, most + 1)
        ),
        *(lambda body, name=name: body.update({name: 3}) for name in ("nonce", "previous", "at")),
        *(
            lambda body, name=name, value=value: body["state"].update({name: value})
            for name, value in (
                *((name, 3) for name in ("stalled_flow_run", "best_metric", "program", "params", "origin")),
                *(("stalled_attempts", value) for value in (-1, True, 1.0, "1")),
                *(("spared_epochs", value) for value in (-1, True, 1.0, MAX_EPOCH + 1)),
            )
        ),
    ],
)
def test_an_entry_that_nobody_wrote_is_damage(change: Any) -> None:
    """P42, P49: names with a way out, missing and foreign fields: damage, even where the digest fits."""
    with pytest.raises(IntegrityError):
        Entry.from_bytes(sealed(change), "x")


def test_the_last_numbers_are_read() -> None:
    """The bounds of entries refuse what is beyond them and nothing else."""
    last = entry(replace(FULL, spared_epochs=MAX_EPOCH), n=MAX_LEDGER_NUMBER, epoch=MAX_EPOCH)
    assert Entry.from_bytes(last.to_bytes()[0], "x")[0] == last
    assert entry(FULL, n=2).to_bytes()  # its own checkpoint has its number
    assert State().with_owner(owner_of(MAX_EPOCH), None, "min").owner == owner_of(MAX_EPOCH)


def test_an_event_that_readers_do_not_know_is_not_put() -> None:
    """P47: what would stop every reader is refused by its writer."""
    with pytest.raises(StateError, match="unknown event"):
        entry(FULL, event={"kind": "teleport"}).to_bytes()


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
    ),
    st.sampled_from(sorted(json.loads(entry(FULL).to_bytes()[0])["state"])),
)
def test_any_json_in_any_place_is_read_or_refused(value: Any, place: str) -> None:
    """P49: no value in any place of the state raises anything but our errors."""
    try:
        Entry.from_bytes(sealed(lambda body: body["state"].update({place: value})), "x")
    except CkptError:
        return
