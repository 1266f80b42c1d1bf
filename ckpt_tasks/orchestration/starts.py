"""What a start of a flow run does for Prefect's pages: end lost task runs, name declined flow runs, forward the log.

A killed process cannot end its task runs: on the pages they would stay "Running" for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import StateType, TaskRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogHandler
from prefect.runtime import deployment, flow_run
from prefect.states import Crashed

__all__ = ["crash_lost_task_runs", "logged_with_the_flow_run", "name_declined_starts"]

_DECLINED = ": not needed, one is at work"
_PAGE = 200  # the server's limit for one answer
_log = logging.getLogger("ckpt_tasks")


def crash_lost_task_runs() -> int:
    """Mark the task runs as crashed that earlier starts of this flow run left unfinished; return how many.

    If Prefect's API does not answer, log a warning and return 0: the pages must not stop training.
    """
    start = flow_run.run_count
    if not flow_run.id or start < 2:
        return 0
    try:
        with get_client(sync_client=True) as client:
            lost = [run for run in _unfinished(client, UUID(flow_run.id)) if run.flow_run_run_count < start]
            for run in lost:
                message = (
                    f"The process of start {run.flow_run_run_count} ended during this task; start {start} goes on."
                )
                client.set_task_run_state(run.id, Crashed(message=message), force=True)
    except (httpx.HTTPError, PrefectException) as error:
        get_run_logger().warning("Task runs of earlier starts may still be shown as running: %s", error)
        return 0
    return len(lost)


def _unfinished(client: SyncPrefectClient, run: UUID) -> list[TaskRun]:
    alive = TaskRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED])
    unfinished: list[TaskRun] = []
    while True:
        page = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])),
            task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=alive)),
            limit=_PAGE,
            offset=len(unfinished),
        )
        unfinished += page
        if len(page) < _PAGE:
            return unfinished


def name_declined_starts(name: str) -> int:
    """Rename the flow runs of this deployment that were cancelled because this one was at work; return how many.

    They never began, so they have random names from Prefect; they keep these if Prefect's API does not answer.
    """
    try:
        if deployment.id is None:  # reading this may call the API
            return 0
        cancelled = FlowRunFilter(
            deployment_id=FlowRunFilterDeploymentId(any_=[UUID(deployment.id)]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CANCELLED])),
        )
        with get_client(sync_client=True) as client:
            newest = client.read_flow_runs(
                flow_run_filter=cancelled, sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=_PAGE
            )
            declined = [run for run in newest if not run.run_count and not run.name.endswith(_DECLINED)]
            for run in declined:
                client.update_flow_run(run.id, name=f"{run.parameters.get('run_key', name)}{_DECLINED}")
    except (httpx.HTTPError, PrefectException) as error:
        get_run_logger().warning("Declined flow runs keep their random names: %s", error)
        return 0
    return len(declined)


@contextmanager
def logged_with_the_flow_run() -> Iterator[None]:
    """Also send the records of the logger `ckpt_tasks`, INFO and above, to the flow run's logs.

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
