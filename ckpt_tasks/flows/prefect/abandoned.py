"""Find flow runs on which no process works, by their stored states instead of events, and start them again.

Workers ignore a flow run that waits for a retry in its own process (`retry_type`), even if that process is gone. They
also ignore every later wait of the flow run, until it leaves a final state (Prefect 3.8.8, issue 22847). So this module
marks such a flow run as crashed before it starts the flow run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterNextScheduledStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.states import AwaitingRetry, Crashed

from ckpt_tasks.flows.prefect.early_stop import RESUMED
from ckpt_tasks.flows.prefect.events import read_all

_MOST_UNBEGUN = 10  # A flow run that never begins is resumed at most this often.
_SKEW = timedelta(minutes=1)  # A time further in the future was written before the clock was set back.


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The seconds after which a flow run counts as abandoned, and how often it may be started."""

    crashed_s: float = 120.0
    silent_s: float = 300.0
    pending_s: float = 3600.0
    max_runs: int = 100


@dataclass(frozen=True, kw_only=True)
class Abandoned:
    """A flow run on which no process works; `why` says how this is known, `due` what to do.

    `due`: "resume" if it has crashed, "crash" or "cancel" if its process is gone, "worker" if no worker takes it.
    """

    run: FlowRun
    why: str
    due: Literal["resume", "crash", "cancel", "worker"]


def find_abandoned(client: SyncPrefectClient, tag: str, limits: Limits) -> Iterator[Abandoned]:
    """Yield the abandoned flow runs with `tag`; crashed flow runs only if they ended within the last day."""
    look = _Look(client, tag, limits)
    yield from look.crashed()
    yield from look.started()
    yield from look.waiting()


class _Look:
    def __init__(self, client: SyncPrefectClient, tag: str, limits: Limits):
        self._client, self._tag, self._limits = client, tag, limits
        self._now = datetime.now(UTC)
        self._quiet = f"no heartbeat for {limits.silent_s:.0f} s"

    def crashed(self) -> Iterator[Abandoned]:
        today = FlowRunFilterEndTime.model_validate({"after_": self._now - timedelta(days=1)})
        for run in self._runs(StateType.CRASHED, end_time=today):
            if self._long_ago(_since(run), self._limits.crashed_s) and self._may_start(run):
                yield Abandoned(run=run, why=f"crashed {self._age(_since(run))} ago", due="resume")

    def started(self) -> Iterator[Abandoned]:
        for run in self._runs(StateType.RUNNING):
            if self._silent(run, _since(run)):
                yield Abandoned(run=run, why=self._quiet, due="crash")
        for run in self._runs(StateType.CANCELLING):
            if self._silent(run, _since(run)):
                yield Abandoned(run=run, why="it was being cancelled, and its process is gone", due="cancel")

    def waiting(self) -> Iterator[Abandoned]:
        for run in self._runs(StateType.PENDING):
            if self._long_ago(_since(run), self._limits.pending_s):
                yield Abandoned(run=run, why=f"pending for {self._limits.pending_s:.0f} s", due="crash")
        before = self._now - timedelta(seconds=self._limits.silent_s)
        overdue = FlowRunFilterNextScheduledStartTime.model_validate({"before_": before})
        for run in self._runs(StateType.SCHEDULED, next_scheduled_start_time=overdue):
            due = run.next_scheduled_start_time or before
            if run.empirical_policy.retry_type != "in_process":
                yield Abandoned(run=run, why=f"due {self._age(due)} ago, and no worker takes it", due="worker")
            elif self._silent(run, due):
                yield Abandoned(run=run, why=f"it waited for its retry, and {self._quiet}", due="crash")

    def _long_ago(self, when: datetime, age_s: float) -> bool:
        return not self._now - timedelta(seconds=age_s) <= when <= self._now + _SKEW

    def _silent(self, run: FlowRun, since: datetime) -> bool:
        return self._long_ago(since, self._limits.silent_s) and not self._sends_heartbeats(run)

    def _age(self, when: datetime) -> str:
        return f"{(self._now - when).total_seconds():.0f} s"

    def _runs(self, state: StateType, **more: Any) -> list[FlowRun]:
        with_tag = FlowRunFilter(
            tags=FlowRunFilterTags(all_=[self._tag]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[state])),
            **more,
        )
        return read_all(self._client.read_flow_runs, flow_run_filter=with_tag)

    def _may_start(self, run: FlowRun) -> bool:
        if run.run_count:
            return run.run_count < self._limits.max_runs
        return sum(state.is_crashed() for state in self._client.read_flow_run_states(run.id)) <= _MOST_UNBEGUN

    def _sends_heartbeats(self, run: FlowRun) -> bool:
        since, until = self._now - timedelta(seconds=self._limits.silent_s), self._now + _SKEW
        heartbeats = {
            "event": {"name": ["prefect.flow-run.heartbeat"]},
            "resource": {"id": [f"prefect.flow-run.{run.id}"]},
            "occurred": {"since": since.isoformat(), "until": until.isoformat()},
        }
        answer = self._client.request("POST", "/events/filter", json={"filter": heartbeats, "limit": 1})
        return bool(answer.json()["events"])


def start_again(client: SyncPrefectClient, run_id: UUID, why: str) -> bool:
    """Schedule an abandoned flow run as if it had crashed; return False if the server refuses.

    Does nothing and returns False if the flow run waits, has ended in another way, or may be started only by a person.
    """
    state = client.read_flow_run(run_id).state
    if state is None or state.type not in (StateType.CRASHED, StateType.RUNNING, StateType.PENDING):
        return False
    if not state.is_crashed():
        client.set_flow_run_state(run_id, Crashed(message=why))
    scheduled: State[None] = AwaitingRetry(message=RESUMED)
    return client.set_flow_run_state(run_id, scheduled).status is SetStateStatus.ACCEPT


def _since(run: FlowRun) -> datetime:
    assert run.state is not None
    return run.state.timestamp
