"""Early stop: where the evaluations of a run no longer get better, its flow run is suspended until a person resumes it.

What a person decided stands. A flow run that was suspended and taken for crashed, because the end of its process came
after its last heartbeat, is suspended again when it is started without a person; one that was cancelled after a crash,
a moment before an automation resumed it, is cancelled again.

What was ever measured is in the ledger: the evaluations of checkpoints that are pruned by now are in older entries.
A note sums up what the entries before it say, so that no process reads more than some hundreds of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.schemas import OrchestrationResult
from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import Abort, Pause, PrefectException
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Suspended

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import StoreError
from ckpt_tasks.format.ledger import Entry
from ckpt_tasks.ledger.entries import newest_first
from ckpt_tasks.ledger.history import History
from ckpt_tasks.policy.stopping import EarlyStop, kept, standing
from ckpt_tasks.reading.reading import run_of

__all__ = ["RESUMED", "EarlyStopping", "stay_as_decided"]

RESUMED = "Crashed: it goes on from its newest good checkpoint."  # the message of what was resumed without a person

_NOTE = "early_stop"
_NOTE_EVERY = 256  # ledger entries


def stay_as_decided() -> None:
    """End the flow run that this is called in again, where a person had suspended or cancelled it.

    Suspended: it was taken for crashed since then. Cancelled: it had crashed, and was resumed all the same. A person
    who resumes or retries it leaves other states, and then nothing is done; nor where it has no deployment.
    """
    if deployment.id is None or flow_run.run_count < 2:
        return
    states = sorted(_states(), key=lambda one: one.timestamp)
    starts = [(before, one) for before, one in pairwise(states) if one.is_scheduled() and one.name != "Late"]
    if starts and starts[-1][0].is_cancelled() and starts[-1][1].message == RESUMED:
        _end(Cancelled(message=starts[-1][0].message))
    ends = [(one, after) for one, after in pairwise(states) if one.is_paused() or one.name == "Resuming"]
    if ends and ends[-1][0].is_paused() and ends[-1][1].is_crashed():
        suspended = ends[-1][0]
        key = f"suspended still at start {flow_run.run_count}"  # a key is good for once
        until = suspended.state_details.pause_timeout
        _end(Suspended(pause_key=key, pause_expiration_time=until, message=suspended.message))


def _states() -> list[State[Any]]:
    with get_client(sync_client=True) as client:
        return client.read_flow_run_states(UUID(flow_run.id))


def _end(state: State[Any]) -> None:
    """Set the flow run's state, and raise what ends this process without another one; a resumed run is a new one."""
    with get_client(sync_client=True) as client:
        answer: OrchestrationResult[Any] = client.set_flow_run_state(UUID(flow_run.id), state)
    if answer.status == SetStateStatus.ACCEPT:
        raise Pause(state=answer.state) if state.is_paused() else Abort(str(state.message))


class EarlyStopping:
    """Watch the evaluations of a run whose owner this process is; without a `rule` nothing is watched.

    `why` says why the run was stopped, None where it was not.
    """

    def __init__(self, ckpt: Checkpointer, rule: EarlyStop | None):
        self.why: str | None = None
        self._ckpt = ckpt
        self._rule = rule
        self._history: History | None = None
        self._values: dict[int, float] = {}
        self._let_go_on_at = -1
        self._next_n = 0
        self._noted_n = 0
        self._stop: Mapping[str, Any] | None = None  # noted by an earlier process of this flow run

    def check(self) -> bool:
        """Say whether the run is to stop here; to be called where all is committed.

        A run that goes on after it was stopped has as much patience again: only what comes after counts. Where the
        store does not answer, the end of the next batch is soon enough.
        """
        try:
            return self._rule is not None and self._check(self._rule)
        except (StoreError, httpx.HTTPError, PrefectException) as error:
            get_run_logger().warning("Whether the run is to stop could not be looked up: %s", error)
            return False

    def _check(self, rule: EarlyStop) -> bool:
        self._read(rule)
        if self._stop is not None and not any(one.state_details.pause_key == self._pause_key for one in _states()):
            self.why = f"stopped at step {self._stop['step']}: {self._stop['why']}"  # that process could not say so
            return True
        self._stop = None
        found, position = standing(self._values, rule, let_go_on_at=self._let_go_on_at), self._ckpt.position
        if found.since < rule.patience:
            if self._next_n - self._noted_n >= _NOTE_EVERY:
                self._note(rule, self._let_go_on_at)
            return False
        best = "no number at all" if found.best is None else f"{found.best:.6g} at step {found.best_step}"
        why = f"{found.since} evaluations by {rule.suite} without a better {rule.metric} than {best}"
        self._let_go_on_at = position
        self._note(rule, position, why=why, step=position)
        self.why = f"stopped at step {position}: {why}"
        return True

    def suspend(self) -> None:
        """Suspend the flow run that this is called in if the run was stopped, for good: a person resumes it.

        Prefect can start the flow run of a deployment again, and no other: of those nothing is suspended.
        """
        if self.why is None:
            return
        get_run_logger().warning("The run is %s", self.why)
        if deployment.id is None:
            return
        _end(Suspended(pause_key=self._pause_key, message=f"The run is {self.why}."))

    @property
    def _pause_key(self) -> str:
        return f"early stop at step {self._let_go_on_at}"

    def _note(self, rule: EarlyStop, let_go_on_at: int, **more: Any) -> None:
        values = [[step, value] for step, value in kept(self._values, rule).items()]
        fields = {**_of(rule), "let_go_on_at": let_go_on_at, "flow_run": flow_run.id, **more}
        self._ckpt.note(_NOTE, **fields, values=values, until=self._next_n)
        self._noted_n = self._next_n

    def _read(self, rule: EarlyStop) -> None:
        """Take in what the ledger has beyond what was read before, newest first, down to what a note sums up."""
        if self._history is None:
            self._history = run_of(self._ckpt.config).history
        next_n = self._history.head().next_n
        summed_up: dict[int, float] | None = None
        newer: dict[int, float] = {}
        end = self._next_n
        for entry, _ in newest_first(self._history, since=end):
            if entry.n < end:
                break
            if entry.event["kind"] == "evaluation":
                newer = {**_measured(entry, rule), **newer}
            elif summed_up is None and _is_ours(entry, rule):
                summed_up = {int(step): float(value) for step, value in entry.event["values"]}
                self._let_go_on_at, self._noted_n = int(entry.event["let_go_on_at"]), entry.n
                self._stop = entry.event if _stops(entry, flow_run.id) else None
                end = max(end, int(entry.event["until"]))  # what came between the look and the note is in neither
        self._values = {**(self._values if summed_up is None else summed_up), **newer}
        self._next_n = next_n


def _is_ours(entry: Entry, rule: EarlyStop) -> bool:
    event = entry.event
    return event["kind"] == "note" and event.get("note") == _NOTE and _of(rule).items() <= event.items()


def _stops(entry: Entry, flow_run_id: str | None) -> bool:
    event = entry.event
    return "why" in event and flow_run_id is not None and event.get("flow_run") == flow_run_id


def _measured(entry: Entry, rule: EarlyStop) -> Mapping[int, float]:
    """Return what the evaluation of an entry says of the metric, by step."""
    one = entry.state.evaluations[-1] if entry.state.evaluations else None
    if one is None or one.suite != rule.suite or rule.metric not in one.metrics:
        return {}
    return {one.step: one.metrics[rule.metric]}


def _of(rule: EarlyStop) -> dict[str, Any]:
    return {"metric": rule.metric, "suite": rule.suite, "mode": rule.mode, "min_delta": rule.min_delta}
