"""Whole runs over a bad line: what was acknowledged is in the ledger; and what requests cost."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_tasks.errors import CkptError, StoreError
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.ledger.history import History
from ckpt_tasks.ledger.observing import ENTRIES_READ, recent
from ckpt_tasks.system import System
from ckpt_tasks.testing import settle
from ckpt_tasks.upkeep.upkeep import verify_run_directory
from tests.faults.s3_runs import Place, commits, is_state, methods, state_of
from tests.support import answers
from tests.support.ledgers import commit, steps
from tests.support.rules import Fault, Rule
from tests.support.systems import running_on


def bad_line(place: Place, seed: int) -> list[Rule]:
    """Lose 20 % of the answers and 10 % of the requests, refuse 10 % with 503, and 5 % of the writes with 409."""
    lost = place.chaos.on(Fault(drop_answer=True), probability=0.2, seed=seed)
    gone = place.chaos.on(Fault(drop_request=True), probability=0.125, seed=seed + 1)
    slow = place.chaos.on(Fault(answer=answers.SLOW_DOWN), probability=0.14, seed=seed + 2)
    taken = Fault(answer=answers.CONDITIONAL_CONFLICT)
    return [lost, gone, slow, place.chaos.on(taken, operation="PutObject", probability=0.08, seed=seed + 3)]


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
@pytest.mark.parametrize("seed", range(4))
def test_runs_over_a_bad_line(place: Place, seed: int) -> None:
    """P30: a third of all requests fail, also while the run is made and pruned: twelve saves in three lives."""
    acked: list[int] = []
    for lived in range(3):
        rules = bad_line(place, 100 * seed + 10 * lived)
        acked += train(place, range(4 * lived + 1, 4 * lived + 5))
        assert all(rule.hits for rule in rules)
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
        bad_line(place, 5)
        before = streams()
        ckpt.save(2, state_of(2))
        after = streams()
        place.chaos.off()
    assert after == before


# ── storms ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("storm_s", "most"), [(1.5, 15), pytest.param(60, 60, marks=pytest.mark.slow)])
def test_a_storm_of_refusals_is_sat_out(
    place: Place, caplog: pytest.LogCaptureFixture, storm_s: float, most: int
) -> None:
    """P43: the store refuses everything for a while: the save waits, ever longer between tries, and is committed.

    One line is logged when it begins, and one when it ends.
    """
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


def test_a_storm_that_outlasts_the_deadline_stops_no_training(place: Place) -> None:
    """P43: with on_flush_failure="warn" training goes on, and the first save after the storm is committed."""
    with place.run(deadline_s=0.3, on_flush_failure="warn", step_interval=1) as ckpt:
        ckpt.save(1, state_of(1))
        storm = place.chaos.on(Fault(answer=answers.SLOW_DOWN))
        ckpt.step(2, state_of(2))
        with pytest.raises(StoreError, match="the store answered 503"):
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


def test_a_commit_is_three_requests(place: Place) -> None:
    """P32: does the newest entry still stand, put, read back; the PUT carries its condition, and nothing is listed."""
    history = place.history()
    for step in (1, 2, 3):
        since = len(place.chaos.log)
        commit(history, step)
        look = "ListObjects GetObject" if step == 1 else "GetObject"  # it does not know the newest entry yet
        assert asked(place, since) == f"{look} PutObject GetObject"
        put = place.chaos.log[-2]
        assert put.headers["if-none-match"] == "*"
        assert methods(place.of_entry(step)[:2]) == "PUT GET"


def operations(place: Place, since: int) -> Counter[str]:
    return Counter(one.operation for one in place.chaos.log[since:])


_DOCUMENTED = {
    "LIST": "ListObjects",
    "GET": "GetObject",
    "PUT": "PutObject",
    "HEAD": "HeadObject",
    "POST": "DeleteObjects",
}


def documented() -> dict[str, Counter[str]]:
    """Read the table of docs/STORES.md: what a save asks for, and what every third one asks for beside that."""
    text = (Path(__file__).parents[2] / "docs/STORES.md").read_text(encoding="utf-8")
    lines = text.partition("## What a save asks of a server")[2].partition("\n## ")[0].splitlines()
    parts: dict[str, Counter[str]] = {"save": Counter()}
    for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")):
        words = cells[0].split(", ")
        if {*words} <= {*_DOCUMENTED} and cells[1].isdigit():
            each = int(cells[1]) // len(words)
            parts[[*parts][-1]].update({_DOCUMENTED[word]: each * words.count(word) for word in {*words}})
        elif cells[1].startswith("**"):
            assert cells[1] == f"**{sum(sum(part.values()) for part in parts.values())}**"
            parts.setdefault("third", Counter())
    assert f"**{(3 * sum(parts['save'].values()) + sum(parts['third'].values())) / 3:.1f} requests a save**" in text
    return parts


@pytest.mark.parametrize("saves", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_what_saves_cost(place: Place, saves: int) -> None:
    """P54, P60: every save of a run asks for what docs/STORES.md says: two groups, metrics, three are kept.

    The newest is read back every third time, and what goes then has an entry of its own. Nothing is asked about what
    the process knows, and nothing grows with what was saved before. On average these are twelve requests.
    """
    counts = []
    with place.run(max_num_checkpoints=3, owner_timeout_s=1e5) as ckpt:  # without a heartbeat
        for step in range(1, saves + 7):
            since = len(place.chaos.log)
            ckpt.save(step, state_of(step), metrics={"loss": 1.0 / step})
            settle(ckpt)
            counts.append(operations(place, since))
    steady, parts = counts[6:], documented()
    assert {frozenset(one.items()) for one in steady[1::3] + steady[2::3]} == {frozenset(parts["save"].items())}
    assert {frozenset(one.items()) for one in steady[::3]} == {frozenset((parts["save"] + parts["third"]).items())}
    assert sum(map(Counter.total, steady)) == 12 * saves


@pytest.mark.parametrize("saves", [(7, 16), pytest.param((100, 301), marks=pytest.mark.slow)], ids=str)
def test_what_a_check_and_a_start_cost(place: Place, saves: tuple[int, int]) -> None:
    """P54: `verify`, and taking, restoring and pruning a run, ask as often after many saves: for what is live.

    The older entries are counted, and read by whoever asks for the history: damage in one is found by that alone.
    """
    costs = []
    for last in saves:
        first = ([0, *saves])[saves.index(last)]
        with place.run(max_num_checkpoints=3, step_interval=1) as ckpt:
            ckpt.restore(state_of(0))
            for step in range(first + 1, last + 1):
                ckpt.save(step, state_of(step), metrics={"loss": 1.0 / step})
                settle(ckpt)
        history, since = History(place.store()), len(place.chaos.log)
        found = verify_run_directory(history)
        checked = operations(place, since)
        assert found.good
        assert found.unread == history.head().next_n - len(history.head().state.live) - 1  # and the release
        since = len(place.chaos.log)
        with place.run(max_num_checkpoints=3, step_interval=1) as ckpt:
            ckpt.restore(state_of(0))
            ckpt.prune()
        costs.append((checked, operations(place, since)))
    assert costs[0] == costs[1]
    place.past.put(ledger_name(2), b"torn")
    assert verify_run_directory(History(place.store())).good
    found = verify_run_directory(History(place.store()), whole=True)
    assert (found.unread, [fault.partition(":")[0] for fault in found.damaged]) == (0, [ledger_name(2)])


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
