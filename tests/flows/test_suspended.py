"""A flow run that a person suspends stays so, whatever takes it for crashed meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.states import AwaitingRetry, Crashed, Running, Suspended

from ckpt_tasks import open_run
from ckpt_tasks.flows.train import train

ROOT = Path(__file__).parents[2]
PREFECT = str(Path(sys.prefix, "bin", "prefect"))


def execute(run: UUID, server: dict[str, str]) -> None:
    """Do what a worker does with a flow run that is due."""
    command = [PREFECT, "flow-run", "execute", str(run)]
    done = subprocess.run(command, cwd=ROOT, env=server, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow  # four processes, each of which loads Prefect, torch and the flow
def test_a_suspended_run_starts_again_for_a_person_alone(
    client: SyncPrefectClient, server: dict[str, str], run_dir: Path
) -> None:
    """Its process beats on until its batch ends, and is then missed: the run is crashed, and scheduled again.

    That start trains nothing and is suspended again, with the time limit that it had; resumed, it trains.
    """
    here = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
    deployment = client.create_deployment(
        client.create_flow(train), "suspended", entrypoint="flows/train.py:train", pull_steps=[here]
    )
    parameters = {
        "run_key": "tiny",
        "total_steps": 5,
        "program": "tests.support.tiny:Tiny",
        "checkpoint": {"checkpoint_dir": str(run_dir)},
    }
    run = client.create_flow_run_from_deployment(deployment, parameters=parameters).id
    states: tuple[State[Any], ...] = (Running(), Suspended(timeout_seconds=6000), Crashed(), AwaitingRetry())
    for state in states:
        client.set_flow_run_state(run, state, force=True)
    suspended = [one for one in client.read_flow_run_states(run) if one.is_paused()]
    for _ in range(2):  # twice: the end of that process may be missed as well
        execute(run, server)
        found = client.read_flow_run(run).state
        assert found is not None
        assert (found.name, run_dir.exists()) == ("Suspended", False)
        assert found.state_details.pause_timeout == suspended[0].state_details.pause_timeout
        client.set_flow_run_state(run, Crashed(), force=True)
        client.set_flow_run_state(run, AwaitingRetry(), force=True)
    execute(run, server)
    client.resume_flow_run(run)
    execute(run, server)
    ended = client.read_flow_run(run).state
    assert ended is not None
    assert ended.is_completed()
    assert open_run(str(run_dir)).find("latest").step == 5
