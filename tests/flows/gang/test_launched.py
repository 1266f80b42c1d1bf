"""Ranks that another launcher has started: what they train, what ends them, and what a later start goes on with."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_tasks.checkpoint.ranks.exchange import StoreExchange
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.errors import ConfigError, StateError
from ckpt_tasks.flows.gang.launched import LaunchedPlace
from ckpt_tasks.flows.gang.orders import Orders
from tests.servers.process import free_port
from tests.support.agents import PARALLEL, config_of, left, trained
from tests.support.launched import ranks
from tests.support.ledgers import is_released, newest_step
from tests.support.sweeps import quick_first

TOTAL = 18


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], list[str]]:
    """Return what two ranks that nobody disturbs have trained."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    with ranks(run_dir) as children:
        assert [child.wait() for child in children] == [0, 0]
    return trained(run_dir)


@pytest.mark.parametrize(
    ("what", "rank", "ends"),
    [
        ("raise", 1, ([1, 1], "rank 1 failed after step 6: RuntimeError: injected in step 7")),
        pytest.param("kill", 0, ([-9, 1], "has ended. "), marks=pytest.mark.slow),
        pytest.param("raise", 0, ([1, 1], "RuntimeError: injected in step 7"), marks=pytest.mark.slow),
        pytest.param("kill", 1, ([1, -9], "rank 1 has ended. The launcher's log says how."), marks=pytest.mark.slow),
        pytest.param("exit", 1, ([1, 1], "rank 1 failed after step 6: SystemExit: 0"), marks=pytest.mark.slow),
    ],
)
def test_where_a_rank_fails_all_end_and_the_next_start_goes_on(
    run_dir: Path, whole: tuple[int, dict[str, Any], list[str]], what: str, rank: int, ends: tuple[list[int], str]
) -> None:
    """A rank that raises, exits or is killed: all ranks end, though no launcher ends them, and rank 0 names it.

    The next start goes on to an end that is bit-equal to that of ranks which nobody disturbed.
    """
    statuses, said = ends
    plan: dict[str, Any] = {"plan": [(7, rank, what)], "folder": str(run_dir.parent)}
    with ranks(run_dir, **plan) as children:
        assert [child.wait() for child in children] == statuses
        assert said in children[what == "kill" and rank == 0].said()
    assert left(str(run_dir)) == []
    with ranks(run_dir, **plan) as children:
        assert [child.wait() for child in children] == [0, 0]
    assert trained(run_dir) == whole


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGUSR1, [1]),
        pytest.param(signal.SIGTERM, [1], marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, [0], marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, [0, 1], marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_any_rank_is_one_commit_at_one_step(
    run_dir: Path, whole: tuple[int, dict[str, Any], list[str]], number: signal.Signals, to: list[int]
) -> None:
    """SIGTERM, Ctrl-C or SIGUSR1 to one rank or all: all commit one step, release the run, and end by that status."""
    with ranks(run_dir, step_s=0.25) as children:
        assert children[0].until(lambda: newest_step(run_dir) >= 4)
        for rank in to:
            children[rank].send(number)
        status = 130 if number == signal.SIGINT else 143
        assert [child.wait() for child in children][1] == status
        assert is_released(run_dir)
    assert 4 <= open_run(str(run_dir)).find("latest").step < TOTAL
    with ranks(run_dir) as children:
        assert [child.wait() for child in children] == [0, 0]
    assert trained(run_dir) == whole


@pytest.fixture
def exchanges() -> Iterator[list[StoreExchange]]:
    """Yield the exchanges of two ranks over a store of their own."""
    c10d: Any = dist
    port, given = free_port(), {"timeout": timedelta(seconds=20), "wait_for_workers": False}
    held = c10d.TCPStore("127.0.0.1", port, 2, is_master=True, **given)
    yield [StoreExchange(c10d.TCPStore("127.0.0.1", port, 2, **given), rank, 2, "gang") for rank in (0, 1)]
    del held


@pytest.mark.parametrize(
    "word",
    quick_first([b"", b"[]", b'["restore"]', b'["eval", 3]', b'["run", -1]', b'["run", "5"]', b"[" * 9999, b"\xff"], 4),
)
def test_an_order_of_a_stranger_is_refused(exchanges: list[StoreExchange], word: bytes) -> None:
    """Strangers can write into the store: what is not an order of ours is refused, and nothing is imported by it."""
    exchanges[1].post("order/1", word)
    with pytest.raises(StateError, match="the store of the ranks has an order that is none"):
        Orders(exchanges[1]).take(bool)


@pytest.mark.parametrize("word", [b"", b"{}", b'[1, {"error": 5}]', b'[1, {"error": "!{}", "ours": true}]', b"\xff"])
def test_a_failure_that_a_stranger_has_written_ends_the_ranks_and_no_more(
    exchanges: list[StoreExchange], word: bytes
) -> None:
    """What cannot be read as a failure is told as one that cannot be read."""
    exchanges[0].post("failed", word)
    first = Orders(exchanges[0]).failed(RuntimeError("connection closed"), 5)
    assert str(first) == "a rank has failed, and its word cannot be read"


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, LaunchedPlace(rank=1, size=4, local_rank=0, local_size=1)),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            LaunchedPlace(rank=3, size=4, local_rank=1, local_size=2),
        ),
    ],
)
def test_the_launcher_says_which_rank_this_is(
    environment: dict[str, str], place: LaunchedPlace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is a rank among others by RANK and WORLD_SIZE; without LOCAL_RANK it is alone on its host."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert LaunchedPlace.find() == place
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK is 'first', not a number: the launcher sets it"):
        LaunchedPlace.find()


def idle(arguments: Sequence[str]) -> None:
    """Be a rank; rank 0 gives no order."""
    options = json.loads(arguments[0])
    os.environ |= options["environment"]
    place, config = LaunchedPlace.find(), config_of(Path(options["run"]))
    assert place is not None
    if place.rank:
        sys.exit(place.follow(config, PARALLEL, {}))
    with place.lead(config, PARALLEL, {}, None):
        sys.stdout.write("here\n")
        sys.stdout.flush()
        signal.pause()


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_rank_that_waits_for_an_order_does_not_wait_for_ever(run_dir: Path, number: signal.Signals) -> None:
    """Rank 0 is killed between two orders, or another rank is told to end there: that rank ends within seconds."""
    with ranks(run_dir, main=idle) as children:
        assert children[0].until(lambda: "here" in children[0].said())
        assert children[1].until(lambda: handles(children[1].pid, signal.SIGTERM))
        children[0 if number == signal.SIGKILL else 1].send(number)
        assert children[1].wait(60) == (1 if number == signal.SIGKILL else 143)


def handles(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return bool(int(next(line.split()[1] for line in lines if line.startswith("SigCgt")), 16) >> (number - 1) & 1)
