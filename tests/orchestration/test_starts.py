"""A flow run that is started again: what the start before left on its pages, and what its logs say."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import State
from prefect.flow_engine import run_flow
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import AwaitingRetry, Cancelled, Running, Scheduled

from ckpt_tasks import CheckpointConfig
from ckpt_tasks.flows.evaluate import evaluate
from ckpt_tasks.flows.train import train
from ckpt_tasks.orchestration.starts import name_declined_starts

pytestmark = pytest.mark.usefixtures("harness")


def artifacts(client: SyncPrefectClient, run: UUID) -> dict[UUID, tuple[str, Any]]:
    mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    return {one.id: (one.key, one.data) for one in client.read_artifacts(artifact_filter=mine) if one.key}


def test_a_second_start(run_dir: Path, tmp_path: Path) -> None:
    """Task runs that were left running are crashed, and say why; three artifacts stay three; the logs name each step.

    Left running: by a process that was killed. Here a record stands for that task run.
    """
    parameters = {
        "run_key": "tiny",
        "total_steps": 10,
        "program": "tests.support.tiny:Tiny",
        "params": {"fail_at": 7, "times": 1, "failures": str(tmp_path / "failures")},
        "batch_steps": 5,
        "retries": 0,
        "checkpoint": {"checkpoint_dir": str(run_dir)},
    }

    @task
    def steps() -> None:
        """Stand for what was running."""

    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(flow_id=client.create_flow(train), name="second start")
        run = client.create_flow_run_from_deployment(deployment, parameters=parameters, state=Scheduled()).id
        with pytest.raises(RuntimeError, match="injected"):
            run_flow(train, flow_run=client.read_flow_run(run), parameters=parameters)
        before = artifacts(client, run)
        lost = client.create_task_run(steps, flow_run_id=run, dynamic_key="lost", state=Running())
        client.set_flow_run_state(run, AwaitingRetry(), force=True)
        run_flow(train, flow_run=client.read_flow_run(run), parameters=parameters)

        state: State[Any] | None = client.read_task_run(lost.id).state
        assert state is not None
        assert state.is_crashed()
        assert str(state.message).endswith("; start 2 goes on.")
        after = artifacts(client, run)
        assert sorted(key for key, _ in after.values()) == ["tiny-checkpoints", "tiny-progress", "tiny-report"]
        assert after.keys() == before.keys()
        assert {data for key, data in after.values() if key == "tiny-progress"} == {100}

        APILogHandler().flush()
        wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))
        lines = [one.message for one in client.read_logs(log_filter=wanted)]
    assert sum(line.startswith("Restored step 5 from memory, as ") for line in lines) == 1, lines
    for step in (0, 5, 10):
        assert sum(line.startswith(f"Saved step {step}: ") for line in lines) == 1, lines


def test_a_declined_start_has_a_name(run_dir: Path) -> None:
    """A flow run that was cancelled since one was at work says so by its name; one that had begun keeps its own."""
    tiny: dict[str, Any] = {"run_key": "tiny", "program": "tests.support.tiny:Tiny"}
    train(**tiny, total_steps=1, checkpoint=CheckpointConfig(checkpoint_dir=str(run_dir)))
    parameters = {**tiny, "checkpoint_dir": str(run_dir)}
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(flow_id=client.create_flow(evaluate), name="declined")
        runs = [client.create_flow_run_from_deployment(deployment, parameters=parameters).id for _ in range(3)]
        client.set_flow_run_state(runs[0], Cancelled(message="Deployment concurrency limit reached."))
        client.set_flow_run_state(runs[1], Running(), force=True)
        client.set_flow_run_state(runs[1], Cancelled(), force=True)
        own = client.read_flow_run(runs[1]).name
        run_flow(evaluate, flow_run=client.read_flow_run(runs[2]), parameters=parameters)
        names = [client.read_flow_run(run).name for run in runs[:2]]
    assert names == ["tiny: not needed, one is at work", own]


def test_an_api_that_is_away_leaves_the_names_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """A random name is not a reason to fail: a warning says that it stays, and the flow goes on."""

    @flow(name="away", persist_result=False)
    def away() -> int:
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}):
            return name_declined_starts("tiny")

    with caplog.at_level("WARNING", logger="prefect.flow_runs"):
        assert away() == 0
    (said,) = caplog.messages
    assert "keep their random names" in said
