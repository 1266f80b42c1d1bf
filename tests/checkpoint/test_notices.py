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
from tests.support.children import Child
from tests.support.sweeps import quick_first
from tests.support.waiting import until

WRONG: list[Any] = [500, "", "[]", '{"Events": [{}]}']


@pytest.fixture
def host() -> Iterator[Metadata]:
    with metadata() as known:
        yield known


def main(arguments: Sequence[str]) -> None:
    """Train steps of 10 ms; none is due to be saved."""
    options = json.loads(arguments[0])
    os.environ |= options["environment"]
    logging.getLogger("ckpt_tasks").handlers.clear()  # What a child has for its warnings would log each one twice.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = CheckpointConfig(checkpoint_dir=options["run"], step_interval=10**6, spot_notices=options["cloud"])
    state = {"w": torch.zeros(3)}
    with Checkpointer(config) as ckpt:
        step = ckpt.restore(state)
        while True:
            state["w"] += 1
            time.sleep(0.01)
            step += 1
            sys.stdout.write(f"step {step}\n")
            sys.stdout.flush()
            ckpt.step(step, state)


def training(run_dir: Path, host: Metadata, cloud: str | None, **environment: str) -> Child:
    given = (host.environment(cloud) if cloud else {}) | environment
    options = {"run": str(run_dir), "cloud": cloud, "environment": given}
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


def check_goes_on(child: Child, steps: int = 5) -> None:
    """The process makes more steps, until it is told to end."""
    at = last_step(child)
    assert child.until(lambda: last_step(child) > at + steps)
    child.send(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM


@pytest.mark.parametrize("cloud", quick_first(CLOUDS))
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


def test_a_server_that_is_silent_away_or_wrong_disturbs_nothing(run_dir: Path, host: Metadata) -> None:
    """No step waits for an answer; what is wrong is logged once, and the notice after it is heard."""
    cloud = "azure"
    host.go.clear()
    with training(run_dir.with_name("silent"), host, cloud) as child:
        assert child.until(lambda: host.asked != [])
        check_goes_on(child)
    host.go.set()
    away = Metadata()
    away.port = free_port()
    with training(run_dir.with_name("away"), away, cloud) as child:
        assert child.until(lambda: "cannot be asked" in child.said())
        check_goes_on(child, 100)
        assert child.said().count("cannot be asked") == 1
    for wrong in WRONG:
        host.wrong = wrong
        with training(run_dir.with_name("wrong"), host, cloud) as child:
            asked = len(host.asked)
            assert child.until(lambda asked=asked: len(host.asked) > asked)  # type: ignore[misc]
            check_goes_on(child)
            assert "Traceback" not in child.said()


@pytest.mark.slow
def test_an_expired_token_is_renewed(run_dir: Path, host: Metadata) -> None:
    """After 401 the next look asks for a new token, and hears the notice."""
    with training(run_dir, host, "aws") as child:
        until(lambda: len(host.asked) >= 3)
        host.token = "token 2"
        host.preempt()
        check_ended_in_order(run_dir, child)
