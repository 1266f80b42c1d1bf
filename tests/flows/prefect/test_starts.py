"""A flow run that is started again: what the start before left on its pages, and what its logs say."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.exceptions import Abort, ObjectNotFound
from prefect.flow_engine import run_flow
from prefect.logging.handlers import APILogHandler
from prefect.states import AwaitingRetry, Completed, Pending, Running, Scheduled

from ckpt_tasks import CheckpointConfig
from ckpt_tasks.cli.doctor.server_checks import check_flow_runs
from ckpt_tasks.errors import OwnedError
from ckpt_tasks.flows.evaluate import evaluate
from ckpt_tasks.flows.prefect.starts import crash_lost_trainings
from ckpt_tasks.flows.train import train
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.ownership import acquire, identify
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.system import process_start
from tests.support.owner_child import OwnerChild

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
        assert str(state.message).endswith("; start 2 continues.")
        after = artifacts(client, run)
        assert sorted(key for key, _ in after.values()) == ["tiny-checkpoints", "tiny-progress", "tiny-report"]
        assert after.keys() == before.keys()
        assert {data for key, data in after.values() if key == "tiny-progress"} == {100}

        APILogHandler().flush()
        wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))
        lines = [one.message for one in client.read_logs(log_filter=wanted)]
    assert sum(line.startswith("Restored step 5 from memory, as ") for line in lines) == 1, lines
    for step in (5, 10):
        assert sum(line.startswith(f"Step {step} committed after ") for line in lines) == 1, lines
    assert [line for line in lines if line.startswith("Saved step")] == []


@pytest.mark.slow
def test_a_training_without_a_site_is_not_running_for_ever(run_dir: Path) -> None:
    """P73: the next start, `ckpt up` and the doctor mark it as crashed once its process is gone, and not before.

    They mark 201 such trainings, although one answer of the server names 200 flow runs at most.
    """
    with get_client(sync_client=True) as client:

        def owned(run: Path, pid: int, began: str) -> UUID:
            parameters = {"run_key": run.name, "checkpoint": {"checkpoint_dir": str(run)}}
            made = client.create_flow_run(train, parameters=parameters, state=Running()).id
            history = History(LocalStore(run))
            history.create(run.name)
            owner = replace(identify(str(made)), pid=pid, process_start=began)
            acquire(history, owner, take_over=False, timeout_s=120.0)
            return made

        def state_of(run: UUID) -> str:
            return str(client.read_flow_run(run).state_name)

        with subprocess.Popen(["sleep", "1000"]) as other:
            began = process_start(other.pid) or ""
            dead = [owned(run_dir / f"dead-{n}", other.pid, began) for n in range(201)]
            alive = owned(run_dir / "alive", os.getppid(), process_start(os.getppid()) or "")
            assert crash_lost_trainings(client) == []
            other.kill()
        assert "marked as crashed" in check_flow_runs(client, tag="none of these").seen
        assert ({*map(state_of, dead)}, state_of(alive)) == ({"Crashed"}, "Running")
        again = owned(run_dir / "again", other.pid, began)
        train(
            run_key="new",
            total_steps=1,
            program="tests.support.tiny:Tiny",
            checkpoint=CheckpointConfig(checkpoint_dir=str(run_dir / "new")),
        )
        assert (state_of(again), state_of(alive)) == ("Crashed", "Running")
        for each in (alive, *dead):  # other tests ask for all flow runs
            client.delete_flow_run(each)


@pytest.mark.slow
def test_a_run_has_one_follower(run_dir: Path) -> None:
    """The second follower of a run ends and leaves no row; another run, or another suite, is none of its business."""
    tiny: dict[str, Any] = {"run_key": "tiny", "program": "tests.support.tiny:Tiny"}
    train(**tiny, total_steps=1, checkpoint=CheckpointConfig(checkpoint_dir=str(run_dir)))
    following = {**tiny, "checkpoint_dir": str(run_dir), "which": "pending", "suite": "quick", "follow_s": 0.01}
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(flow_id=client.create_flow(evaluate), name="follower")

        def started(**changed: Any) -> FlowRun:
            return client.create_flow_run_from_deployment(deployment, parameters={**following, **changed})

        others = [started(checkpoint_dir=f"{run_dir}-2"), started(suite="full")]
        at_work = started(checkpoint_dir=str(run_dir.parent / run_dir.name))
        for run in (*others, at_work):
            client.set_flow_run_state(run.id, Running(), force=True)
        second = started()
        with pytest.raises(Abort, match="is at work"):
            run_flow(evaluate, flow_run=second, parameters=following)
        with pytest.raises(ObjectNotFound):
            client.read_flow_run(second.id)
        client.set_flow_run_state(at_work.id, Completed(), force=True)
        results: Any = run_flow(evaluate, flow_run=started(), parameters=following)
    assert [result.new for result in results] == [True, True]


@pytest.mark.slow
def test_a_schedule_that_fires_while_the_run_trains(run_dir: Path) -> None:
    """It is no failure: the flow run ends as skipped and says who trains; one that a person starts fails, as before."""
    parameters = {
        "run_key": run_dir.name,
        "total_steps": 10,
        "program": "tests.support.tiny:Tiny",
        "checkpoint": {"checkpoint_dir": str(run_dir)},
    }
    other = OwnerChild(run_dir, "another")
    assert other.ask("save 1") == "ok 1"
    with get_client(sync_client=True) as client:
        hourly = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=timedelta(hours=1)))
        deployment = client.create_deployment(
            client.create_flow(train), "skips", schedules=[hourly], parameters=parameters
        )
        one: dict[str, Any] = {"min_runs": 1, "max_runs": 1}
        client.request("POST", "/deployments/{id}/schedule", path_params={"id": deployment}, json=one)
        of_schedule = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment]))
        run = client.read_flow_runs(flow_run_filter=of_schedule)[0]
        client.set_flow_run_state(run.id, Pending(), force=True)
        with pytest.raises(Abort, match=f"trains already: process {other.process.pid} on "):
            run_flow(train, flow_run=run, parameters=parameters)
        state = client.read_flow_run(run.id).state
        assert state is not None
        assert (state.name, state.type.value) == ("Skipped", "CANCELLED")
        run = client.create_flow_run_from_deployment(deployment, parameters=parameters)
        with pytest.raises(OwnedError):
            run_flow(train, flow_run=run, parameters=parameters)
        client.delete_deployment(deployment)  # with what it has planned: other tests ask for the newest flow run
    other.kill()
