"""The ledger as values: what each event does to the state, which line is the run's, and what bytes are an entry."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.errors import CkptError, FormatVersionError, IntegrityError, StateError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.keys import MAX_EPOCH, MAX_LEDGER_NUMBER, evaluation_name
from ckpt_tasks.format.ledger import (
    Checkpoint,
    Entry,
    Evaluation,
    Lease,
    State,
    lineage,
)
from ckpt_tasks.format.manifest import FORMAT_VERSION
from tests.support.ledgers import made, owner_of

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


def test_the_newest_commit_is_first() -> None:
    """P51, P53: order is the order of commits: 9 before 10, whatever clocks or texts say."""
    state = run_of((9, None), (10, "9@1"), (100, "10@2"))
    assert names(state) == ["100@3", "10@2", "9@1"]


def test_after_going_back_the_old_line_is_left_behind() -> None:
    """P71: training went back to step 10 and on from there; what stood after it is abandoned and never newest again."""
    state = run_of((10, None), (20, "10@1"), (30, "20@2"), (15, "10@1"))
    assert names(state) == ["15@4", "10@1", "30@3", "20@2"]
    assert {c.step for c in state.live if c.abandoned} == {20, 30}
    state = state.with_checkpoint(made(20, 5, "15@4"), NONE)
    assert names(state)[:3] == ["20@5", "15@4", "10@1"]


def test_the_same_step_saved_again_is_the_newer_one() -> None:
    """P32, P71: a step that is saved twice is two checkpoints, and the later one counts."""
    state = run_of((10, None), (20, "10@1"), (20, "10@1"))
    assert names(state) == ["20@3", "10@1", "20@2"]


def test_going_back_to_an_abandoned_line_makes_it_the_run_again() -> None:
    """P71: a restore of a chosen step on a line that was left, and a save from it, bring that line back."""
    state = run_of((10, None), (20, "10@1"), (15, "10@1"), (25, "20@2"))
    assert names(state) == ["25@4", "20@2", "10@1", "15@3"]


def test_the_line_survives_a_pruned_parent() -> None:
    """P71: with the checkpoints between gone, nothing on the present line is taken for abandoned."""
    state = run_of((10, None), (20, "10@1"), (30, "20@2"))
    state = state.retire(frozenset({"10@1", "20@2"}), (), NONE)
    state = state.with_checkpoint(made(40, 4, "30@3"), NONE)
    assert names(state) == ["40@4", "30@3"]
    assert not any(c.abandoned for c in state.live)


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


@given(st.lists(st.integers(0, 5), max_size=12))
def test_the_line_of_the_last_commit_is_never_abandoned(parents: list[int]) -> None:
    """P71: whatever the run goes back to, its present line is first, newest to oldest, and all else comes after it."""
    state = State()
    line: dict[str, list[str]] = {}
    known: list[Checkpoint] = []
    for n, choice in enumerate(parents, start=1):
        parent = known[-1 - choice % len(known)] if known else None
        checkpoint = made(n, n, parent.manifest_digest if parent else None)
        line[checkpoint.manifest_digest] = [
            checkpoint.manifest_digest,
            *(line[parent.manifest_digest] if parent else []),
        ]
        state = state.with_checkpoint(checkpoint, NONE)
        known.append(checkpoint)
        expected = line[checkpoint.manifest_digest]
        assert names(state)[: len(expected)] == expected
        assert {c.manifest_digest for c in state.live if not c.abandoned} == set(expected)


def test_what_is_retired_takes_its_facts_with_it() -> None:
    """P64, P65: pins, leases and evaluations of a retired checkpoint go; its objects stay named until deleted."""
    state = run_of((10, None), (20, "10@1")).with_pin("10@1", "mine").with_pin("20@2", "mine")
    for digest in ("10@1", "20@2"):
        state = state.with_lease(lease(digest), 0.0).with_evaluation(evaluation(digest))
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


def evaluation(digest: str) -> Evaluation:
    return Evaluation(
        manifest_digest=digest,
        step=1,
        suite="quick",
        metrics={"loss": float("nan")},
        table=evaluation_name(1, "quick", "0" * 16),
        table_digest="f" * 32,
        evaluated_at="2024-01-01",
    )


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
    state = State().with_checkpoint(made(1, 1, metrics=metrics), NONE).with_evaluation(evaluation("1@1"))
    data, _ = entry(state, event={**fields, "kind": "note"}).to_bytes()
    json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again, _ = Entry.from_bytes(data, "x")
    assert repr(again.state.live[0].metrics) == repr({k: metrics[k] for k in sorted(metrics)})
    assert repr(again.state.evaluations[0].metrics["loss"]) == "nan"


def test_every_flipped_bit_is_damage_or_means_the_same() -> None:
    """P49: an entry with any one bit flipped is refused, unless it still says exactly the same."""
    data, _ = entry(FULL).to_bytes()
    refused = 0
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        try:
            again, _ = Entry.from_bytes(bytes(flipped), "x")
        except IntegrityError:
            refused += 1
        else:
            assert again == entry(FULL)
    assert refused > 0.99 * len(data)


def sealed(change: Any) -> bytes:
    """Change an entry's body and give it a fitting digest, as a newer writer or an attacker would."""
    body = json.loads(entry(FULL).to_bytes()[0])
    del body["digest"]
    change(body)
    return canonical_json({**body, "digest": digest_hex(canonical_json(body))})


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(version=FORMAT_VERSION + 1),
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
        lambda body: body["state"]["live"][0].update(manifest=None),
        lambda body: body["state"].update(live={"object": "../x", "digest": "f"}),
        lambda body: body["state"].update(live={"object": "file:///x", "digest": "f"}),
        lambda body: body["state"].update(live={"digest": "f"}),
        lambda body: body["state"]["live"][0].update(metrics={"loss": 10**400}),
        lambda body: body["state"]["live"][0].update(metrics={"loss": []}),
        lambda body: body["state"]["live"][0].update(more=1),
        lambda body: body["state"]["live"][0].pop("step"),
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


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"[" * 100_000, b"\0" * 500, b"\xff", b'{"digest":1}', b"{}"])
def test_torn_bytes_are_damage(data: bytes) -> None:
    """P35, P49: a cut, zero-filled or foreign object in a number is damage, which counts as "nothing happened"."""
    with pytest.raises(IntegrityError):
        Entry.from_bytes(data, "x")


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
