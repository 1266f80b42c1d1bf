"""Resume crashed flow runs that the automations missed: the deployment `watch/byte-lm`.

An automation acts on events, and events can be lost: a server on SQLite drops some under load, and a server that dies
loses the latest ones. This flow looks at states, which are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import AwaitingRetry, Cancelled, Crashed

from ckpt_tasks.orchestration.early_stop import RESUMED

__all__ = ["Watched", "watch"]

_MOST_UNBEGUN = 10  # resumes of a flow run that has never begun
_PAGE = 200  # the server's limit for one answer


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The names of the flow runs that were resumed, marked as crashed (`dead`), and marked as cancelled."""

    resumed: tuple[str, ...]
    dead: tuple[str, ...]
    cancelled: tuple[str, ...] = ()


@flow(name="watch", flow_run_name="{tag}", persist_result=False)
def watch(
    *,
    tag: str = "ckpt-tasks",
    crashed_s: float = 120.0,
    silent_s: float = 300.0,
    pending_s: float = 3600.0,
    max_runs: int = 100,
) -> Watched:
    """Resume the flow runs with `tag` that crashed at least `crashed_s` seconds and at most a day ago.

    A flow run is resumed until it has started `max_runs` times; one that never began, because the server was too busy,
    ten times. A running flow run without a heartbeat for `silent_s` seconds is marked as crashed, and resumed next
    time. So is a flow run that is pending for `pending_s` seconds, because its worker died; a cluster may need long to
    start a process. A flow run that was being cancelled when its host died is marked as cancelled after `silent_s`.
    """
    now = datetime.now(UTC)
    today = FlowRunFilterEndTime.model_validate({"after_": now - timedelta(days=1)})
    log = get_run_logger()
    resumed = []
    with get_client(sync_client=True) as client:
        for run in _runs(client, tag, StateType.CRASHED, ended=today):
            age = now - _since(run)
            if timedelta(seconds=crashed_s) <= age and _may_start(client, run, max_runs):
                scheduled: State[None] = AwaitingRetry(message=RESUMED)
                if client.set_flow_run_state(run.id, scheduled).status is SetStateStatus.ACCEPT:
                    resumed.append(run.name)
                    log.warning("%s crashed %.0f s ago and is resumed", run.name, age.total_seconds())
                else:
                    log.warning("%s crashed, and the server refuses to resume it: does it have a deployment?", run.name)
        silent, pending = now - timedelta(seconds=silent_s), now - timedelta(seconds=pending_s)
        why = f"No heartbeat for {silent_s:.0f} s."
        dead = [
            (run, why)
            for run in _runs(client, tag, StateType.RUNNING)
            if str(run.id) != flow_run.id and _since(run) < silent and not _sends_heartbeats(client, run, silent)
        ]
        cancelled = [
            run
            for run in _runs(client, tag, StateType.CANCELLING)
            if _since(run) < silent and not _sends_heartbeats(client, run, silent)
        ]
        dead += [
            (run, f"Pending for {pending_s:.0f} s.")
            for run in _runs(client, tag, StateType.PENDING)
            if _since(run) < pending
        ]
        for run, why in dead:
            client.set_flow_run_state(run.id, Crashed(message=why))
            log.warning("%s is marked as crashed: %s", run.name, why)
        for run in cancelled:
            client.set_flow_run_state(run.id, Cancelled(message="It was being cancelled, and its process is gone."))
            log.warning("%s is marked as cancelled: its process is gone", run.name)
    return Watched(
        resumed=tuple(resumed),
        dead=tuple(run.name for run, _ in dead),
        cancelled=tuple(run.name for run in cancelled),
    )


def _runs(
    client: SyncPrefectClient, tag: str, state: StateType, ended: FlowRunFilterEndTime | None = None
) -> list[FlowRun]:
    with_tag = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[tag]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[state])),
        end_time=ended,
    )
    runs: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(flow_run_filter=with_tag, limit=_PAGE, offset=len(runs))
        runs += page
        if len(page) < _PAGE:
            return runs


def _may_start(client: SyncPrefectClient, run: FlowRun, max_runs: int) -> bool:
    if run.run_count:
        return run.run_count < max_runs
    return sum(state.is_crashed() for state in client.read_flow_run_states(run.id)) <= _MOST_UNBEGUN


def _since(run: FlowRun) -> datetime:
    assert run.state is not None
    return run.state.timestamp


def _sends_heartbeats(client: SyncPrefectClient, run: FlowRun, since: datetime) -> bool:
    heartbeats = {
        "event": {"name": ["prefect.flow-run.heartbeat"]},
        "resource": {"id": [f"prefect.flow-run.{run.id}"]},
        "occurred": {"since": since.isoformat()},
    }
    answer = client.request("POST", "/events/filter", json={"filter": heartbeats, "limit": 1})
    return bool(answer.json()["events"])
