"""Actions of a flow run at its start: end lost task runs, continue an old flow run, avoid two followers, send logs.

A killed process cannot end its task runs: on the pages they would stay "Running" for ever.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType, TaskRun
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, ObjectNotFound, PrefectException
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogHandler
from prefect.runtime import flow_run
from prefect.states import Cancelled, Crashed, Pending

from ckpt_tasks.checkpoint.restore.reading import run_of
from ckpt_tasks.errors import CheckpointNotFoundError, CkptError
from ckpt_tasks.flows.prefect.config import config_of_run
from ckpt_tasks.flows.prefect.events import absolute, client_without_retries, read_all
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.ownership import identify, why_free

_ANSWER_S = 10.0
_log = logging.getLogger("ckpt_tasks")


def crash_lost_task_runs() -> int:
    """Mark lost trainings, and task runs of earlier starts of this flow run, as crashed; return the number of these.

    If Prefect's API does not answer, log a warning and return 0: the pages must not stop training.
    """
    start = flow_run.run_count
    if not flow_run.id:
        return 0
    try:
        with get_client(sync_client=True) as client:
            if start < 2:  # A later start is that of a deployment, whose site looks after its flow runs.
                crash_lost_trainings(client)
                return 0
            lost = [run for run in _unfinished(client, UUID(flow_run.id)) if run.flow_run_run_count < start]
            for run in lost:
                message = (
                    f"The process of start {run.flow_run_run_count} ended during this task; start {start} continues."
                )
                client.set_task_run_state(run.id, Crashed(message=message), force=True)
    except (httpx.HTTPError, PrefectException) as error:
        get_run_logger().warning("Task runs of earlier starts may still be shown as running: %s", error)
        return 0
    return len(lost)


def crash_lost_trainings(client: SyncPrefectClient) -> list[str]:
    """Mark trainings as crashed that no deployment started and whose process is gone; return their names.

    Nothing else would: such a flow run sends no heartbeats. Their runs' ledgers tell, for processes of this host.
    """
    wanted = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING])),
        deployment_id=FlowRunFilterDeploymentId(is_null_=True),
    )
    named = FlowFilter(name=FlowFilterName(any_=["train"]))
    lost = []
    for run in read_all(client.read_flow_runs, flow_filter=named, flow_run_filter=wanted):
        if why := _why_lost(run):
            client.set_flow_run_state(run.id, Crashed(message=f"{why[0].upper()}{why[1:]}."))
            lost.append(run.name)
    return lost


def _why_lost(run: FlowRun) -> str | None:
    """Return why the process of a flow run is gone; None if it may live, or if its run cannot be read here."""
    with suppress(CkptError, KeyError, TypeError):
        where = CheckpointConfig(checkpoint_dir=run.parameters["checkpoint"]["checkpoint_dir"])
        if "://" in where.location.url:  # A store that does not answer would take half a minute.
            return None
        owner = run_of(config_of_run(where, run.parameters["run_key"])).head().state.owner
        if owner is not None and owner.flow_run_id == str(run.id):
            return why_free(replace(owner, released=False), identify(None), None, float("inf"))
    return None


def let_workers_take_it() -> None:
    """Let a worker take this flow run when it is scheduled again, although Prefect has retried it in this process.

    Workers ignore a flow run that waits for a retry in its own process, and Prefect does not forget that when the retry
    begins: after a preemption nothing would start it for minutes (Prefect 3.8.8, issue 22847). A preemption during the
    delay before a retry is as bad, so the end of this process lets workers take it as well.
    """
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None:
        return
    if run.run_count > 1:
        _forget_retry(run.id)
    if run.empirical_policy.retries and run.id not in _at_exit:
        _at_exit.add(run.id)
        atexit.register(_forget_retry, run.id)


_at_exit: set[UUID] = set()  # The flow runs whose retry the end of this process forgets.


def _forget_retry(run_id: UUID) -> None:
    try:
        with client_without_retries(_ANSWER_S) as client:
            policy = client.read_flow_run(run_id).empirical_policy
            if policy.retry_type == "in_process":
                policy = policy.model_copy(update={"retry_type": None})
                client.update_flow_run(run_id, empirical_policy=policy)
    except (httpx.HTTPError, PrefectException) as error:
        _log.warning("A preempted flow run may wait for minutes before a worker takes it: %s", error)


def _unfinished(client: SyncPrefectClient, run: UUID) -> list[TaskRun]:
    alive = TaskRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED])
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
    with_state = TaskRunFilter(state=TaskRunFilterState(type=alive))
    return read_all(client.read_task_runs, flow_run_filter=of_run, task_run_filter=with_state)


def flow_run_to_go_on(config: CheckpointConfig, parameters: Mapping[str, Any]) -> FlowRun | None:
    """Return the flow run of the run's last owner, set to pending, to run it again; None if it has ended by itself.

    Also returns None if that flow run has a deployment or other parameters. A flow run that has crashed, or whose
    process is gone, is run again.
    """
    with suppress(CheckpointNotFoundError, ObjectNotFound, ValueError), get_client(sync_client=True) as client:
        owner = run_of(config).head().state.owner
        if owner is None or owner.flow_run_id is None:
            return None
        run = client.read_flow_run(UUID(owner.flow_run_id))
        same = all(name in run.parameters and run.parameters[name] == value for name, value in parameters.items())
        if run.state is None or run.deployment_id is not None or not same:
            return None
        if run.state.is_running() or run.state.is_scheduled():
            client.set_flow_run_state(run.id, Crashed(message="Its process is gone."))
        elif not run.state.is_crashed() and not run.state.is_pending():
            return None
        client.set_flow_run_state(run.id, Pending(message="Its launcher has started it again."))
        return client.read_flow_run(run.id)
    return None


def leave_to_follower(url: str, suite: str) -> None:
    """End and delete this flow run if an earlier one of the same deployment evaluates this run with this suite.

    The events of a run start such a flow run every ten minutes. Returns if Prefect's API does not answer.
    """
    context = FlowRunContext.get()
    mine = context.flow_run if context else None
    if mine is None or mine.deployment_id is None:
        return
    at_work = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[mine.deployment_id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING])),
    )
    try:
        with get_client(sync_client=True) as client:
            for run in read_all(client.read_flow_runs, flow_run_filter=at_work):
                earlier = (run.expected_start_time, run.id) < (mine.expected_start_time, mine.id)
                if earlier and run.parameters.get("suite") == suite and _evaluated_url(run.parameters) == url:
                    why = f"{run.name} is at work"
                    client.set_flow_run_state(mine.id, Cancelled(name="Skipped", message=why))
                    client.delete_flow_run(mine.id)  # Prefect's page would list a flow run that did nothing.
                    raise Abort(why)
    except (httpx.HTTPError, PrefectException) as error:
        get_run_logger().warning("Another flow run may evaluate this run too: %s", error)


def _evaluated_url(parameters: Mapping[str, Any]) -> str:
    where = CheckpointConfig(checkpoint_dir=parameters["checkpoint_dir"])
    return absolute(config_of_run(where, parameters["run_key"]).location.url)


@contextmanager
def logged_with_the_flow_run() -> Iterator[None]:
    """Also send log records of `ckpt_tasks`, INFO and above, to the flow run's logs.

    Prefect's own logging needs a flow run context, and commits happen in a thread without one.
    """
    handler, level = _Handler(flow_run.id), _log.level
    _log.addHandler(handler)
    if not _log.isEnabledFor(logging.INFO):
        _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.setLevel(level)
        _log.removeHandler(handler)


class _Handler(APILogHandler):
    def __init__(self, flow_run_id: str | None):
        super().__init__(logging.INFO)
        self._flow_run_id = flow_run_id

    def emit(self, record: logging.LogRecord) -> None:
        record.flow_run_id = self._flow_run_id
        super().emit(record)
