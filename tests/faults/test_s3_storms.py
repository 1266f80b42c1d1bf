"""Many writers and whole runs over a bad line: what was acknowledged is in the ledger once; and what requests cost."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from ckpt_tasks.errors import CkptError, CommitUncertainError, StoreError
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.ledger.history import History
from ckpt_tasks.ledger.observing import ENTRIES_READ, recent
from ckpt_tasks.system import System
from tests.faults.s3_runs import LEDGER, Place, commits, is_state, methods, state_of
from tests.support import answers
from tests.support.ledgers import commit, steps
from tests.support.rules import Fault, Rule
from tests.support.systems import running_on


def bad_line(place: Place, *, key: str = "", seed: int = 0) -> list[Rule]:
    """Lose 20 % of the answers and 10 % of the requests, refuse 10 % with 503, and 5 % of the writes with 409."""
    lost = place.chaos.on(Fault(drop_answer=True), key=key, probability=0.2, seed=seed)
    gone = place.chaos.on(Fault(drop_request=True), key=key, probability=0.125, seed=seed + 1)
    slow = place.chaos.on(Fault(answer=answers.SLOW_DOWN), key=key, probability=0.14, seed=seed + 2)
    taken = Fault(answer=answers.CONDITIONAL_CONFLICT)
    return [lost, gone, slow, place.chaos.on(taken, key=key, operation="PutObject", probability=0.08, seed=seed + 3)]


# ── many writers ─────────────────────────────────────────────────────────────────────────────────────────────────


def race(place: Place, *, writers: int, each: int, seed: int) -> None:
    """Let writers commit at once over a bad line; every step is a commit of its own."""
    store = place.history(deadline_s=60).store
    rules = bad_line(place, key=LEDGER, seed=seed)
    start = threading.Barrier(writers)

    def write(who: int) -> dict[int, bool]:
        history, told = History(store), {}
        start.wait()
        for step in range(who * each, (who + 1) * each):
            try:
                commit(history, step)
                told[step] = True
            except (StoreError, CommitUncertainError):
                told[step] = False
        return told

    with ThreadPoolExecutor(writers) as threads:
        told = {step: done for part in threads.map(write, range(writers)) for step, done in part.items()}
    assert all(rule.hits for rule in rules)
    found = Counter(commits(place.truth))
    assert [step for step, done in told.items() if found[step] != 1 and (done or found[step])] == []
    assert sorted(steps(place.truth.head())) == sorted(found)
    assert sum(told.values()) > 0.9 * writers * each


def test_writers_that_race_over_a_bad_line(place: Place) -> None:
    """P33: five writers, four commits each: every acknowledged one is in the ledger exactly once, and is live."""
    race(place, writers=5, each=4, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 22, 33])
def test_sixteen_writers_that_race_over_a_bad_line(place: Place, seed: int) -> None:
    """P33: sixteen writers, six commits each."""
    race(place, writers=16, each=6, seed=seed)


# ── whole runs ───────────────────────────────────────────────────────────────────────────────────────────────────


def train(place: Place, steps: range) -> list[int]:
    """Save over a bad line and return the steps that were acknowledged; a save that fails is made again once."""
    acked = []
    with place.run(max_num_checkpoints=3) as ckpt:
        ckpt.restore(state_of(0))
        for step in steps:
            for _ in range(2):
                try:
                    ckpt.save(step, state_of(step))
                except StoreError:
                    continue
                acked.append(step)
                break
    return acked


def check_run(place: Place, acked: list[int]) -> None:
    """Nothing acknowledged is lost, and the newest is restored, bit for bit."""
    place.chaos.off()
    found = Counter(commits(place.truth))
    assert [step for step in acked if found[step] < 1] == []
    assert [step for step, times in found.items() if times > 2] == []
    state = state_of(0)
    with place.run() as ckpt:
        assert ckpt.restore(state) == acked[-1]
        assert ckpt.last_restore is not None
        assert (ckpt.last_restore.skipped, ckpt.last_restore.damaged) == ((), ())
        assert [one.step for one in ckpt.checkpoints()] == sorted(steps(place.truth.head()), reverse=True)
    assert is_state(state, acked[-1])


@pytest.mark.slow
def test_a_run_over_a_bad_line(place: Place) -> None:
    """P30: a third of all requests fail, also while the run is made and pruned: it is saved, pruned and restored."""
    rules = bad_line(place, seed=7)
    acked = train(place, range(1, 6))
    assert all(rule.hits for rule in rules)
    assert acked[-1] == 5
    check_run(place, acked)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_runs_over_a_bad_line(place: Place, seed: int) -> None:
    """P30: twelve saves in three lives."""
    acked: list[int] = []
    for lived in range(3):
        bad_line(place, seed=100 * seed + 10 * lived)
        acked += train(place, range(4 * lived + 1, 4 * lived + 5))
        place.chaos.off()
    check_run(place, acked)


def streams() -> tuple[object, bytes, list[int]]:
    """Return where the random streams of this process are."""
    legacy = np.random.get_state()[1]  # type: ignore[index]  # noqa: NPY002 (what training draws from)
    return random.getstate(), bytes(memoryview(legacy)), torch.get_rng_state().tolist()


def test_a_bad_line_changes_no_random_number(place: Place) -> None:
    """P11: saving while requests fail and are made again draws nothing from the generators that training uses."""
    with place.run() as ckpt:
        ckpt.save(1, state_of(1))
        bad_line(place, seed=5)
        before = streams()
        ckpt.save(2, state_of(2))
        after = streams()
        place.chaos.off()
    assert after == before


# ── storms ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sit_out(place: Place, caplog: pytest.LogCaptureFixture, *, storm_s: float, most: int) -> None:
    with running_on(System()), place.run(deadline_s=storm_s + 20) as ckpt:
        ckpt.save(1, state_of(1))
        storm = place.chaos.on(Fault(answer=answers.SLOW_DOWN))
        over = threading.Timer(storm_s, place.chaos.off)
        over.start()
        ckpt.save(2, state_of(2))
        over.join()
        assert 2 < storm.hits < most
    assert commits(place.truth) == [1, 2]
    told = [record.getMessage() for record in caplog.records if place.url in record.getMessage()]
    assert [sum(words in line for line in told) for words in ("trying again", "answers again")] == [1, 1]


def test_a_storm_of_refusals_is_sat_out(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """P43: the store refuses everything for a while: the save waits, ever longer between tries, and is committed.

    One line is logged when it begins, and one when it ends.
    """
    sit_out(place, caplog, storm_s=1.5, most=15)


@pytest.mark.slow
def test_a_long_storm_of_refusals_is_sat_out(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """P43: a minute of it, with fewer than sixty requests."""
    sit_out(place, caplog, storm_s=60, most=60)


def test_a_storm_that_outlasts_the_deadline_stops_no_training(place: Place) -> None:
    """P43: with on_flush_failure="warn" training goes on, and the first save after the storm is committed."""
    with place.run(deadline_s=0.3, on_flush_failure="warn", step_interval=1) as ckpt:
        ckpt.save(1, state_of(1))
        storm = place.chaos.on(Fault(answer=answers.SLOW_DOWN))
        ckpt.step(2, state_of(2))
        with pytest.raises(StoreError, match="503 SlowDown"):
            ckpt.wait()
        ckpt.step(3, state_of(3))
        with pytest.raises(CkptError):
            ckpt.save(4, state_of(4))
        place.chaos.off(storm)
        ckpt.save(5, state_of(5))
    assert commits(place.truth) == [1, 5]


# ── what requests cost ───────────────────────────────────────────────────────────────────────────────────────────


def asked(place: Place, since: int) -> str:
    return " ".join(one.operation for one in place.chaos.log[since:])


@pytest.mark.parametrize("entries", [1, 40, pytest.param(2500, marks=pytest.mark.slow)])
def test_the_newest_is_found_with_two_requests(place: Place, entries: int) -> None:
    """P54: however long the ledger: one listing of a few names, and one read."""
    history = place.history()
    newest = replace(place.truth.read_entry(0)[0], n=entries - 1)
    place.past.put(ledger_name(newest.n), newest.to_bytes()[0])
    with ThreadPoolExecutor(8) as threads:  # what lies below the newest is never read
        [*threads.map(lambda n: place.past.put(ledger_name(n), b"old"), range(1, newest.n))]
    assert history.head().next_n == entries
    assert asked(place, 0) == "ListObjects GetObject"
    assert place.chaos.log[0].received_bytes < 16_000


def test_a_commit_is_four_requests(place: Place) -> None:
    """P32: look (two), put, read back; the PUT carries its condition, and its number is asked for nowhere else."""
    history = place.history()
    for step in (1, 2, 3):
        since = len(place.chaos.log)
        commit(history, step)
        assert asked(place, since) == "ListObjects GetObject PutObject GetObject"
        put = place.chaos.log[since + 2]
        assert put.headers["if-none-match"] == "*"
        assert methods(place.of_entry(step)[:2]) == "PUT GET"


def operations(place: Place, since: int) -> Counter[str]:
    return Counter(one.operation for one in place.chaos.log[since:])


@pytest.mark.parametrize(
    ("kept", "cost"),
    [
        (None, {"ListObjects": 2, "GetObject": 2, "PutObject": 5, "HeadObject": 2}),
        (3, {"ListObjects": 2, "GetObject": 2, "PutObject": 5, "HeadObject": 2, "DeleteObject": 4}),
    ],
)
def test_what_a_save_costs(place: Place, kept: int | None, cost: dict[str, int]) -> None:
    """P54, P60: a small checkpoint is two objects of data, two of description, and the same requests every time.

    What each is for stands in docs/STORES.md. Where the commit's entry retires another one, beside the save itself each
    of its objects; every third save reads a checkpoint back, and has an entry of its own for what goes then.
    """
    with place.run(max_num_checkpoints=kept) as ckpt:
        counts = []
        for step in range(1, 10):
            since = len(place.chaos.log)
            ckpt.save(step, state_of(step))
            ckpt._pruner.finish(60)
            counts.append(operations(place, since))
    assert counts[7] == counts[8] == cost


@pytest.mark.parametrize("saves", [18, pytest.param(300, marks=pytest.mark.slow)])
def test_what_saves_cost_on_average(place: Place, saves: int) -> None:
    """P54: of a run of two groups with metrics that keeps three, all requests counted: 21.1, as docs/STORES.md says."""
    since = 0
    with place.run(max_num_checkpoints=3) as ckpt:
        for step in range(1, saves + 7):
            if step == 7:  # a cycle of three is under way
                since = len(place.chaos.log)
            ckpt.save(step, state_of(step), metrics={"loss": 1.0 / step})
            ckpt._pruner.finish(60)
        counted = operations(place, since)
    assert sum(counted.values()) / saves < 21.5  # a slow machine adds a heartbeat or two


def test_what_a_start_with_an_automatic_cadence_costs(place: Place) -> None:
    """P54: the newest entries are read several at a time, and no more than say what the cadence needs."""
    history = place.history()
    for step in range(1, 8):
        commit(history, step)
    history.head()
    since = len(place.chaos.log)
    assert len(recent(history, 5)) == 5
    assert operations(place, since) == {"ListObjects": 1, "GetObject": 5}
    assert ENTRIES_READ <= 256
