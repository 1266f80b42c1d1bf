"""What a run's ledger says about saves and failures: read from real entries, and never more than is in them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.format.policy.cadence import Observed, SavePoint
from ckpt_tasks.format.records import Owner
from ckpt_tasks.run.ledger.observing import ENTRIES_READ, LearningCadence, observe, recent, summarize
from ckpt_tasks.run.ledger.ownership import acquire, identify
from tests.support.cli_runs import flip
from tests.support.histories import LOST, Told, trained
from tests.support.systems import Hurried, running_on

COSTS = {"stall_s": 0.05, "flush_s": 0.5, "step_s": 0.25}


@pytest.fixture
def told(run_dir: Path) -> Told:
    return Told(run_dir).taken()


def observed_of(told: Told) -> Observed:
    observed = observe(told.history)
    assert observed is not None
    return observed


# ── costs ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cost_is_the_median_of_the_newest_commits(told: Told) -> None:
    """One slow save does not move it, a store that has become slower does within 32 commits."""
    trained(told, 40, every_s=60.0, steps=1, **COSTS)
    trained(told, 1, every_s=60.0, steps=1, **{**COSTS, "flush_s": 90.0})
    observed = observed_of(told)
    assert observed.flush_s == 0.5
    trained(told, 20, every_s=60.0, steps=1, **{**COSTS, "flush_s": 5.0})
    observed = observed_of(told)
    assert observed.flush_s == 5.0


def test_a_clock_that_goes_back_takes_nothing_away(told: Told) -> None:
    """P53: a gap between commits that a wrong clock made negative counts as nothing; a reader's entry ends none.

    Older commits, without the figures: the cost is stall and flush, and a step takes what is left between commits.
    """
    told.after(100).commit(10).after(-1e6).commit(20).after(20).evaluated().after(30).commit(30)
    observed = observed_of(told)
    assert (observed.trained_s, observed.stall_s, observed.flush_s) == (150.0, 0.5, 0.5)  # cost_s of `made`
    assert observed.step_s == pytest.approx((50 - 0.5) / 10)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────


def owner_lost(kind: str) -> Owner:
    """Describe an owner that `acquire` finds gone, of each kind that it knows."""
    here = replace(identify(None), epoch=1)
    return {
        "gone": replace(here, pid=os.getpid(), process_start="1"),
        "restarted": replace(here, host="node", machine_id="m", boot_id="before"),
        "silent": replace(here, host="elsewhere", machine_id="e", taken_at="2024-01-01T00:00:00+00:00"),
        "stuck": replace(here, host="elsewhere", machine_id="e", flow_run_id="flow"),
        "released": replace(here, released=True),
    }[kind]


@pytest.mark.parametrize("kind", ["gone", "restarted", "silent", "stuck", "released"])
def test_the_words_are_those_of_the_take_over(run_dir: Path, kind: str) -> None:
    """What `acquire` itself writes of an owner that was lost is read as a failure, of one that let go it is not."""
    told = Told(run_dir).taken().after(60).commit(1, **COSTS)
    lost = owner_lost(kind)
    told.history.append({"kind": "pin"}, lambda state, n: replace(state, owner=lost), owner=None)
    me = identify("flow")
    if kind == "restarted":
        me = replace(me, host="node", machine_id="m", boot_id="after")
    with running_on(Hurried(1000 if kind == "stuck" else 1)):  # it waits for the grace
        acquire(told.history, me, take_over=False, timeout_s=0.5)
    assert observed_of(told).failures == (kind != "released")


def test_a_failure_that_ends_its_process_counts_once(told: Told) -> None:
    """Noted, and then the process is gone as well: one failure. With a commit or a release between: two."""
    told.after(60).commit(1, **COSTS).noted().taken(LOST)
    assert observed_of(told).failures == 1
    told.after(60).commit(2, **COSTS).noted().after(60).commit(3, **COSTS).taken(LOST)
    assert observed_of(told).failures == 3
    told.noted().released().taken("its owner released it").taken(LOST)
    assert observed_of(told).failures == 5


@pytest.mark.parametrize(("flush_s", "stall_s", "first_s"), [(0.5, 0.2, 10.0), (40.0, 0.2, 40.0), (0.5, 0.6, 19.4)])
def test_after_a_failure_the_first_save_is_early(told: Told, flush_s: float, stall_s: float, first_s: float) -> None:
    """A process that begins after a death saves as early as a new run, but for a flush or the overhead cap.

    One that begins after a release has the interval of the history, and so has the next save of either.
    """
    trained(told, 3, every_s=600.0, steps=1, **{**COSTS, "flush_s": flush_s, "stall_s": stall_s})
    usual_s = LearningCadence(told.released().taken("its owner released it").history).interval_s
    assert usual_s > 100
    again = LearningCadence(told.taken(LOST).history)
    assert again.interval_s == pytest.approx(first_s)
    begin = SavePoint(step=1, epoch=None, clock_s=0.0)
    assert [again.due(begin, replace(begin, step=2, clock_s=first_s + more_s)) for more_s in (-0.1, 0.1)] == [
        False,
        True,
    ]
    trained(told, 1, every_s=10.0, steps=1, **COSTS)
    newest = told.history.good_entry(told.history.head().next_n - 1)
    assert newest is not None
    again.learn(newest[0])
    assert again.interval_s > 40


# ── what is read ─────────────────────────────────────────────────────────────────────────────────────────────


def test_only_the_newest_entries_are_read(told: Told) -> None:
    """However long the history, no more than the newest entries are read, and they say when training failed lately."""
    trained(told, 20, every_s=60.0, steps=1, **COSTS)
    told.taken(LOST)
    trained(told, 5, every_s=60.0, steps=1, **COSTS)
    assert [one.kind for one in recent(told.history, 6)] == ["lost"] + ["commit"] * 5
    assert [one.kind for one in recent(told.history, 5)] == ["commit"] * 5
    assert summarize(recent(told.history, 5)) == Observed(failures=0, trained_s=240.0, **COSTS)
    assert len(recent(told.history)) == 27
    assert 200 <= ENTRIES_READ <= 1000


def test_training_ends_with_its_owner(run_dir: Path, told: Told) -> None:
    """P49: where the entry of a new owner cannot be read, the time until its first commit is still not training."""
    told.after(60).commit(1, **COSTS).after(3600).taken(LOST).after(60).commit(2, **COSTS).after(60).commit(3, **COSTS)
    flip(run_dir / ledger_name(2), 40)
    assert observe(told.history) == Observed(failures=0, trained_s=120.0, **COSTS)
    flip(run_dir / ledger_name(0), 40)
    assert observe(told.history) == Observed(failures=0, trained_s=60.0, **COSTS)
