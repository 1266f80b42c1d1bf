"""Notices of a spot instance that come by HTTP: each in a real process, against the documented answers of its cloud."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from tests.servers.metadata import CLOUDS, Metadata, metadata
from tests.servers.process import free_port
from tests.support.agents import main as agent_main
from tests.support.children import Child
from tests.support.waiting import until

WRONG: list[Any] = [500, 404, 401, "", "[]", "{}", "null", "<html>", "TRUE?", '{"Events": 3}', '{"Events": [{}]}']


@pytest.fixture
def host() -> Iterator[Metadata]:
    with metadata() as known:
        yield known


def main(arguments: Sequence[str]) -> None:
    """Train steps of 10 ms; none is due to be saved. `total` -1: until told to end."""
    options = json.loads(arguments[0])
    os.environ |= options["environment"]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = CheckpointConfig(checkpoint_dir=options["run"], step_interval=10**6, spot_notices=options["cloud"])
    state = {"w": torch.zeros(3)}
    with Checkpointer(config) as ckpt:
        step = ckpt.restore(state)
        while step != options["total"]:
            state["w"] += 1
            time.sleep(0.01)
            step += 1
            sys.stdout.write(f"step {step}\n")
            sys.stdout.flush()
            ckpt.step(step, state)
        ckpt.save(step, state)


def training(run_dir: Path, host: Metadata, cloud: str | None, *, total: int = -1, **environment: str) -> Child:
    given = (host.environment(cloud) if cloud else {}) | environment
    options = {"run": str(run_dir), "cloud": cloud, "total": total, "environment": given}
    return Child(main, [json.dumps(options)], run_dir.with_name(f"{run_dir.name}.log"))


def last_step(child: Child) -> int:
    return max((int(line.split()[1]) for line in child.said().splitlines() if line.startswith("step ")), default=0)


def check_ended_in_order(run_dir: Path, child: Child) -> None:
    """The process ended as at a preemption: by SIGTERM, its last step committed and its run released."""
    assert child.wait() == -signal.SIGTERM
    run = open_run(str(run_dir))
    assert [one.step for one in run.checkpoints()] == ([last_step(child)] if last_step(child) else [])
    owner = run.head().state.owner
    assert owner is not None
    assert owner.released


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_notice_ends_the_run_after_the_step(run_dir: Path, host: Metadata, cloud: str) -> None:
    """A notice in the training is the end of the step, its commit, the release and SIGTERM; the log says of what."""
    with training(run_dir, host, cloud) as child:
        assert child.until(lambda: last_step(child) > 2 and len(host.asked) > 1)
        host.preempt()
        check_ended_in_order(run_dir, child)
        assert f"{cloud}: this " in child.said()
    assert host.refused == []
    if cloud == "azure":  # The eviction is not hastened.
        assert {line.split()[0] for line in host.asked} == {"GET"}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_notice_before_the_start_is_heard_too(run_dir: Path, host: Metadata, cloud: str) -> None:
    """A process that begins on a host that is about to go ends before its first step, or commits the one under way."""
    host.preempt()
    with training(run_dir, host, cloud) as child:
        check_ended_in_order(run_dir, child)


@pytest.mark.parametrize(
    "cloud", [pytest.param(one, marks=pytest.mark.slow if at else ()) for at, one in enumerate(CLOUDS)]
)
def test_a_server_that_is_silent_away_or_wrong_disturbs_nothing(run_dir: Path, host: Metadata, cloud: str) -> None:
    """No step waits for an answer; what is wrong is logged once, and the notice after it is heard."""
    host.go.clear()
    with training(run_dir.with_name("silent"), host, cloud, total=50) as child:
        assert child.wait() == 0
    assert len(host.asked) == 1
    host.go.set()
    away = Metadata()
    away.port = free_port()
    with training(run_dir.with_name("away"), away, cloud, total=300) as child:
        assert child.wait() == 0
        assert child.said().count("cannot be asked") == 1
    for wrong in WRONG:
        host.wrong = wrong
        with training(run_dir.with_name("wrong"), host, cloud) as child:
            asked = len(host.asked)
            assert child.until(lambda asked=asked: len(host.asked) > asked)  # type: ignore[misc]
            at = last_step(child)
            assert child.until(lambda at=at: last_step(child) > at + 5)  # type: ignore[misc]
            child.send(signal.SIGTERM)
            assert child.wait() == -signal.SIGTERM
            assert "Traceback" not in child.said()


def test_nothing_is_asked_unasked(run_dir: Path, host: Metadata) -> None:
    """Without the option there is no request, and ranks of one host ask once."""
    everywhere = {name: value for cloud in CLOUDS for name, value in host.environment(cloud).items()}
    with training(run_dir, host, None, total=20, **everywhere) as child:
        assert child.wait() == 0
    with training(run_dir.with_name("second"), host, "aws", total=20, LOCAL_RANK="1") as child:
        assert child.wait() == 0
    assert host.asked == []


def test_what_is_only_likely_or_anothers_changes_nothing(run_dir: Path, host: Metadata) -> None:
    """A recommendation to rebalance is logged; an event of another machine of a scale set is not even that."""
    host.likely = True
    with training(run_dir, host, "aws", total=100) as child:
        assert child.wait() == 0
        assert child.said().count("an interruption has become likely since 2026-01-05T18:02:00Z") == 1
    host.preempt("trainer_8")
    with training(run_dir.with_name("azure"), host, "azure", total=100) as child:
        assert child.wait() == 0
        assert "evicted" not in child.said()
    assert sum("scheduledevents" in line for line in host.asked) >= 1


def test_an_expired_token_is_renewed(run_dir: Path, host: Metadata) -> None:
    """After 401 the next look asks for a new token, and hears the notice."""
    with training(run_dir, host, "aws") as child:
        until(lambda: len(host.asked) >= 3)
        host.token = "token 2"
        host.preempt()
        check_ended_in_order(run_dir, child)


def test_a_gang_ends_in_order(run_dir: Path, host: Metadata) -> None:
    """With ranks of ours a notice is one commit at one step in all of them, and the agent ends by SIGTERM."""
    given = {"run": str(run_dir), "mark": str(run_dir), "total": 10**6, "batch": 10**6, "params": {"step_s": 0.01}}
    options = given | {"environment": host.environment("google"), "config": {"spot_notices": "google"}}
    with Child(agent_main, [json.dumps(options)], run_dir.with_name("agent.log")) as agent:
        assert agent.until(lambda: (run_dir / "format.json").exists() and len(open_run(str(run_dir)).checkpoints()) > 1)
        host.preempt()
        assert agent.wait() == -signal.SIGTERM
    owner = open_run(str(run_dir)).head().state.owner
    assert owner is not None
    assert owner.released
