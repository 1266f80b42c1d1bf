"""Whole runs over a bad line: what was acknowledged is in the ledger; and what requests cost."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_tasks.errors import StoreError
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from ckpt_tasks.testing import settle
from tests.faults.s3_runs import Place, commits, is_state, state_of
from tests.support import answers
from tests.support.ledgers import commit
from tests.support.rules import Fault, Rule
from tests.support.sweeps import quick_first


def bad_line(place: Place, seed: int) -> list[Rule]:
    """Lose 20 % of the answers and 10 % of the requests, refuse 10 % with 503, and 5 % of the writes with 409."""
    lost = place.chaos.on(Fault(drop_answer=True), probability=0.2, seed=seed)
    gone = place.chaos.on(Fault(drop_request=True), probability=0.125, seed=seed + 1)
    slow = place.chaos.on(Fault(answer=answers.SLOW_DOWN), probability=0.14, seed=seed + 2)
    taken = Fault(answer=answers.CONDITIONAL_CONFLICT)
    return [lost, gone, slow, place.chaos.on(taken, operation="PutObject", probability=0.08, seed=seed + 3)]


# ── whole runs ───────────────────────────────────────────────────────────────────────────────────────────────────


def streams() -> tuple[object, bytes, list[int]]:
    """Return where the random streams of this process are."""
    legacy = np.random.get_state()[1]  # type: ignore[index]  # noqa: NPY002 (what training draws from)
    return random.getstate(), bytes(memoryview(legacy)), torch.get_rng_state().tolist()


@pytest.mark.parametrize("lives", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_runs_over_a_bad_line(place: Place, lives: int) -> None:
    """P11, P30: a third of all requests fail, also while the run is made and pruned: what was acknowledged is there.

    The newest comes back bit for bit, and nothing is drawn from the generators that training uses.
    """
    acked: list[int] = []
    rules: list[Rule] = []
    before = streams()
    for life in range(lives):
        rules += bad_line(place, 10 * life)
        with place.run(max_num_checkpoints=3) as ckpt:
            ckpt.restore(state_of(0))
            for step in range(4 * life + 1, 4 * life + 5):
                for _ in range(2):  # a save that fails is made again once
                    with suppress(StoreError):
                        ckpt.save(step, state_of(step))
                        acked.append(step)
                        break
        place.chaos.off()
    assert all(any(rule.hits for rule in rules[kind::4]) for kind in range(4))
    assert streams() == before
    assert {*acked} <= {*commits(place.truth)}
    state = state_of(0)
    with place.run() as ckpt:
        assert ckpt.restore(state) == acked[-1]
        assert ckpt.last_restore is not None
        assert (ckpt.last_restore.skipped, ckpt.last_restore.damaged) == ((), ())
    assert is_state(state, acked[-1])


# ── what requests cost ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("entries", quick_first([40, 1, 2500]))
def test_the_newest_and_a_commit_ask_for_little(place: Place, entries: int) -> None:
    """P32, P54: however long the ledger: a listing of a few names and one read; a commit puts once and reads back.

    The PUT carries its condition, and nothing is listed once the newest entry is known.
    """
    history = place.history()
    newest = replace(place.truth.read_entry(0)[0], n=entries - 1)
    place.past.put(ledger_name(newest.n), newest.to_bytes()[0])
    with ThreadPoolExecutor(8) as threads:  # what lies below the newest is never read
        [*threads.map(lambda n: place.past.put(ledger_name(n), b"old"), range(1, newest.n))]
    assert history.head().next_n == entries
    assert place.asked() == "ListObjects GetObject"
    assert place.chaos.log[0].received_bytes < 16_000
    since = len(place.chaos.log)
    assert commit(history, 5) == entries
    assert place.asked().split()[since:] == ["GetObject", "PutObject", "GetObject"]
    assert place.chaos.log[-2].headers["if-none-match"] == "*"


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


@pytest.mark.slow
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


@pytest.mark.slow
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
