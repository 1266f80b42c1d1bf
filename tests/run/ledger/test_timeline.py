"""A run's course out of its ledger, and what became of its time: read from real entries, and cut without a rest."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks import Checkpointer, open_run
from ckpt_tasks.run.ledger.goodput import SHARES, Course, follow
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.timeline import Moment, read_timeline
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import settle
from tests.support.cli_runs import config, flip, save_steps, some_state
from tests.support.histories import ReadEntries, Told

CLOCK = ("taken", "lost", "commit", "failure", "released")


def told(*moments: tuple[float, str, dict[str, Any]], epoch: int = 1) -> list[Moment]:
    """Write moments down; a commit's identity is its number, its parent the commit before unless it says another."""
    found: list[Moment] = []
    for n, (at_s, kind, more) in enumerate(moments):
        before = [one.identity for one in found if one.kind == "commit"]
        line = {"identity": str(n), "parent": before[-1] if before else None} if kind == "commit" else {}
        epoch += bool(found) and kind in ("taken", "lost")
        found.append(Moment(kind=kind, n=n, epoch=epoch, at_s=at_s, **{**line, **more}))
    return found


def shares(course: Course) -> dict[str, float]:
    return {name: round(seconds, 6) for name, seconds in course.seconds.items() if seconds}


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_entries_become_moments(run_dir: Path) -> None:
    """Owners, commits with metrics and parents, evaluations, failures, prunes and releases come out, oldest first."""
    with Checkpointer(config(run_dir, max_num_checkpoints=1)) as ckpt:
        ckpt.save(0, some_state(0))
        ckpt.save(10, some_state(10), metrics={"loss": 0.5})
        settle(ckpt)
        ckpt.note("failure", step=10, why="RuntimeError: <b>no</b>")
        ckpt.note("mine", about="nothing that a time line shows")
    run = open_run(str(run_dir))
    run.record_evaluation(run.find("latest"), "quick", {"heldout_loss": 0.7})
    found = read_timeline(run.history)
    assert [one.kind for one in found.moments] == [
        *("taken", "commit", "commit", "pruned", "failure", "released", "evaluation")
    ]
    first, second = (one for one in found.moments if one.kind == "commit")
    assert (second.step, second.metrics, second.parent) == (10, {"loss": 0.5}, first.identity)
    failure, evaluation = found.moments[4], found.moments[-1]
    assert (failure.step, failure.text) == (10, "RuntimeError: <b>no</b>")
    assert (evaluation.step, evaluation.text, evaluation.metrics) == (10, "quick", {"heldout_loss": 0.7})
    assert (found.damaged, found.older, found.copied) == (0, 0, False)


def test_what_cannot_be_read_is_left_out_and_counted(run_dir: Path) -> None:
    """A damaged entry is one less, and is said; so are those that are beyond the bound."""
    save_steps(run_dir, 1, 2, 3, 4)
    entries = sorted(run_dir.glob("ledger/*"))
    flip(entries[len(entries) // 2], 40)
    history = open_run(str(run_dir)).history
    found = read_timeline(history)
    assert (len(found.moments), found.damaged, found.older) == (5, 1, 0)
    assert read_timeline(history, 3).older == 3
    assert [one.n for one in read_timeline(history, 3).moments] == [one.n for one in found.moments][-3:]


def test_only_new_entries_are_read_again(run_dir: Path) -> None:
    """What is known is not read once more, the result is that of reading all, and the bound counts all of them."""
    save_steps(run_dir, 1, 2)
    history = open_run(str(run_dir)).history
    known = read_timeline(history)
    state = some_state()
    with Checkpointer(config(run_dir)) as ckpt:
        ckpt.restore(state)
        ckpt.save(3, state)
    history.store = store = ReadEntries(history.store)
    again = read_timeline(history, known=known)
    assert store.numbers == list(range(known.newest_n + 1, again.newest_n + 1))
    assert again == read_timeline(history)
    assert read_timeline(history, 2, known).moments == again.moments[-2:]


def test_a_far_store_is_read_several_at_a_time_in_order(run_dir: Path) -> None:
    """The moments of a store that is far away come in the order of their entries."""
    run = Told(run_dir).taken()
    for step in range(1, 40):
        run.after(1.0).commit(step)
    store = LocalStore(run_dir)
    store.near = False
    found = read_timeline(History(store))
    assert [one.n for one in found.moments] == list(range(40))
    assert found == read_timeline(run.history)


# ── goodput ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_share_has_its_cause() -> None:
    """One run with all of it: start, saves, a death, a failed attempt, a stop, waiting; each second in its place."""
    fast = {"trained_s": 40.0, "data_s": 10.0, "stall_s": 1.0}
    run = told(
        (0.0, "taken", {}),
        (60.0, "commit", {"step": 100, **fast}),  # 9 s of start, 40 s of steps, 10 s without data, 1 s of save
        (115.0, "commit", {"step": 200, **fast}),  # 4 s of something else, 50 s of steps, 1 s of save
        (200.0, "lost", {}),  # it had died somewhere in these 85 s
        (261.0, "commit", {"step": 300, **fast}),  # 10 s of start
        (280.0, "failure", {}),  # 19 s thrown away
        (340.0, "commit", {"step": 400, **fast}),  # 9 s of retry delay and restore
        (342.0, "released", {}),
        (1000.0, "taken", {}),
        (1051.0, "commit", {"step": 500, **fast}),
    )
    course = follow(run)
    assert shares(course) == {
        "useful": 200.0,
        "data": 50.0,
        "lost": 19.0,
        "saving": 5.0,
        "starting": 9.0 + 10.0 + 9.0,
        "down": 85.0,
        "idle": 658.0,
        "unattributed": 4.0 + 2.0,
    }
    assert course.wall_s == 1051.0
    assert course.goodput == pytest.approx(200 / 1051)
    assert [one.elapsed_s for one in course.deaths] == [115.0]
    assert [one.elapsed_s for one in course.resumes] == [200.0, 1000.0]


STEP = {"trained_s": 10.0}
SMALL: dict[str, tuple[list[tuple[float, str, dict[str, Any]]], dict[str, float], set[int]]] = {
    "nothing": ([], {}, set()),
    "steps on a line that was left are lost": (
        [
            (0.0, "taken", {}),
            (0.0, "commit", {"step": 0}),
            (10.0, "commit", {"step": 10, **STEP}),
            (20.0, "commit", {"step": 20, **STEP}),  # damaged afterwards, and passed over
            *((20.0, kind, {}) for kind in ("released", "taken")),
            (30.0, "commit", {"step": 20, "parent": "2", **STEP}),
        ],
        {"useful": 20.0, "lost": 10.0},
        {1, 2, 6},
    ),
    "a slow flush beside training makes no step useless: a commit has the time of its snapshot": (
        [
            (0.0, "taken", {}),
            (18.0, "commit", {"step": 10, "flush_s": 8.0, **STEP}),
            (21.0, "commit", {"step": 20, "flush_s": 1.0, **STEP}),
        ],
        {"useful": 20.0},
        {1, 2},
    ),
    "a gap in the line is bridged": (
        [
            (0.0, "commit", {}),
            (0.0, "commit", {"parent": "in a damaged entry"}),
            (0.0, "commit", {"identity": None, "parent": None}),  # its checkpoint is gone
            (0.0, "commit", {"parent": "gone"}),
        ],
        {},
        {0, 1, 2, 3},
    ),
    "a clock that is set back makes no time": (
        [
            (0.0, "taken", {}),
            *((at_s, "commit", {"step": n * 10, **STEP}) for n, at_s in enumerate((10.0, 4.0, 12.0), 1)),
        ],
        {"useful": 12.0},
        {1, 2, 3},
    ),
    "what others write takes no time, and does not stretch it": (
        [
            (0.0, "taken", {}),
            (4.0, "evaluation", {}),
            (10.0, "commit", {"step": 10, **STEP}),
            (9_999.0, "evaluation", {}),
        ],
        {"useful": 10.0},
        {2},
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_time_is_shared_out(name: str) -> None:
    """Each case is its sentence; the wall time is the sum of the shares."""
    moments, wanted, line = SMALL[name]
    course = follow(told(*moments))
    assert (shares(course), {*course.line}, course.wall_s) == (wanted, line, sum(wanted.values()))
    assert (course.goodput is None) == (not wanted)


seconds = st.floats(0, 1e7)
moments = st.lists(
    st.builds(
        dict[str, Any],
        kind=st.sampled_from([*CLOCK, "evaluation", "pruned", "fallback"]),
        epoch=st.integers(1, 3),
        at_s=st.floats(-1e9, 1e9),
        step=st.none() | st.integers(0, 10**12),
        identity=st.none() | st.sampled_from("abcdef"),
        parent=st.none() | st.sampled_from("abcdef"),
        stall_s=seconds,
        flush_s=seconds,
        trained_s=seconds,
        data_s=seconds,
    ),
    max_size=30,
).map(lambda found: [Moment(n=n, **one) for n, one in enumerate(found)])


@given(moments)
def test_shares_are_never_negative_and_sum_to_the_wall_time(found: list[Moment]) -> None:
    """Whatever a ledger says, clocks that go back included: the time is cut without overlap, rest or negative part."""
    course = follow(found)
    assert set(course.seconds) == set(SHARES)
    assert all(span.begin_s < span.end_s for span in course.spans)
    assert all(before.end_s == pytest.approx(after.begin_s) for before, after in pairwise(course.spans))
    assert math.isclose(sum(course.seconds.values()), course.wall_s, rel_tol=1e-6, abs_tol=1e-6)
    assert course.goodput is None or 0 <= course.goodput <= 1
    places = [one.elapsed_s for one in course.placed]
    assert places == sorted(places)
    assert all(0 <= place <= course.wall_s for place in places)
    assert [one.moment for one in course.placed] == found
