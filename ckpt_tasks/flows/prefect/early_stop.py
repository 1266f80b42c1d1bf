"""Early stop: when a run's evaluations no longer improve, end its flow run; another flow run trains on.

An automatic start must not undo a person's decision. The process of a suspended flow run sends heartbeats until its
batch ends; then an automation misses the heartbeats, marks the flow run as crashed, and starts it: the new start
suspends it again. If a person cancels a crashed flow run just before an automation resumes it, the new start cancels
it again.

The ledger holds every evaluation; its older entries hold the evaluations of pruned checkpoints. A note summarises the
entries before it, so that a process reads at most a few hundred entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Suspended

from ckpt_tasks.checkpoint.restore.reading import run_of
from ckpt_tasks.errors import StoreError
from ckpt_tasks.flows.prefect.endings import end_flow_run
from ckpt_tasks.flows.session.session import TrainedRun
from ckpt_tasks.format.ledger import Entry
from ckpt_tasks.format.policy.stopping import EarlyStop, kept, standing
from ckpt_tasks.run.ledger.history import History, newest_first

# The state message of an automatically resumed flow run.
RESUMED = "Crashed: it resumes from its newest good checkpoint."

_NOTE = "early_stop"
_NOTE_EVERY = 256  # Write a note after this many ledger entries, so that the next process need not read them.


def stay_as_decided() -> None:
    """Suspend or cancel the current flow run again if an automation started it after a suspension or cancellation.

    The flow run's history shows such a start: a state Crashed after Suspended, or the automation's start after
    Cancelled. Does nothing if a person resumed or retried the flow run, which leaves another history, or if it has no
    deployment. Otherwise raises Prefect's Pause or Abort, which end this process.
    """
    if deployment.id is None or flow_run.run_count < 2:
        return
    states = sorted(_states(), key=lambda state: state.timestamp)
    starts = [(before, state) for before, state in pairwise(states) if state.is_scheduled() and state.name != "Late"]
    if starts and starts[-1][0].is_cancelled() and starts[-1][1].message == RESUMED:
        end_flow_run(Cancelled(message=starts[-1][0].message))
    ends = [(state, after) for state, after in pairwise(states) if state.is_paused() or state.name == "Resuming"]
    if ends and ends[-1][0].is_paused() and ends[-1][1].is_crashed():
        suspended = ends[-1][0]
        key = f"suspended still at start {flow_run.run_count}"  # Prefect accepts a pause key only once.
        until = suspended.state_details.pause_timeout
        end_flow_run(Suspended(pause_key=key, pause_expiration_time=until, message=suspended.message))


def _states() -> list[State[Any]]:
    with get_client(sync_client=True) as client:
        return client.read_flow_run_states(UUID(flow_run.id))


class EarlyStopping:
    """Watches the evaluations of a run that this process owns; without a `rule` it does nothing.

    `why` is the reason for the stop; None if the run was not stopped.
    """

    def __init__(self, ckpt: TrainedRun, rule: EarlyStop | None):
        self.why: str | None = None
        self._ckpt = ckpt
        self._rule = rule
        self._history: History | None = None
        self._values: dict[int, float] = {}
        self._resumed_at = -1
        self._next_n = 0
        self._noted_n = 0
        self._stop: Mapping[str, Any] | None = None  # The note of a stop by an earlier process of this flow run.

    def check(self) -> bool:
        """Return True if the run should stop now; call this when everything is committed.

        After a stop, another flow run has the full patience again: only later evaluations use it up. If the store does
        not answer, returns False; the end of the next batch checks again.
        """
        try:
            return self._rule is not None and self._check(self._rule)
        except StoreError as error:
            get_run_logger().warning("Early stop was not checked: %s", error)
            return False

    def _check(self, rule: EarlyStop) -> bool:
        self._read(rule)
        if self._stop is not None:  # The earlier process ended before its flow run did.
            self.why = f"stopped at step {self._stop['step']}: {self._stop['why']}"
            return True
        result, position = standing(self._values, rule, let_go_on_at=self._resumed_at), self._ckpt.position
        if result.since < rule.patience:
            if self._next_n - self._noted_n >= _NOTE_EVERY:
                self._note(rule, self._resumed_at)
            return False
        best = "no number at all" if result.best is None else f"{result.best:.6g} at step {result.best_step}"
        count = "1 evaluation" if result.since == 1 else f"{result.since} evaluations"
        why = f"{count} by {rule.suite} without a better {rule.metric} than {best}"
        self._resumed_at = position
        self._note(rule, position, why=why, step=position)
        self.why = f"stopped at step {position}: {why}"
        return True

    def _note(self, rule: EarlyStop, resumed_at: int, **more: Any) -> None:
        values = [[step, value] for step, value in kept(self._values, rule).items()]
        fields = {**_of(rule), "let_go_on_at": resumed_at, "flow_run": flow_run.id, **more}
        self._ckpt.note(_NOTE, **fields, values=values, until=self._next_n)
        self._noted_n = self._next_n

    def _read(self, rule: EarlyStop) -> None:
        """Read new ledger entries, newest first, down to the entries that the newest note summarises."""
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
                self._resumed_at, self._noted_n = int(entry.event["let_go_on_at"]), entry.n
                self._stop = entry.event if _stops(entry, flow_run.id) else None
                end = max(end, int(entry.event["until"]))  # The note summarises the entries below `until`.
        self._values = {**(self._values if summed_up is None else summed_up), **newer}
        self._next_n = next_n


def _is_ours(entry: Entry, rule: EarlyStop) -> bool:
    event = entry.event
    return event["kind"] == "note" and event.get("note") == _NOTE and _of(rule).items() <= event.items()


def _stops(entry: Entry, flow_run_id: str | None) -> bool:
    event = entry.event
    return "why" in event and flow_run_id is not None and event.get("flow_run") == flow_run_id


def _measured(entry: Entry, rule: EarlyStop) -> Mapping[int, float]:
    """Return the metric's value by step from an evaluation's entry; empty if it is of another suite or metric."""
    evaluation = entry.state.evaluations[-1] if entry.state.evaluations else None
    if evaluation is None or evaluation.suite != rule.suite or rule.metric not in evaluation.metrics:
        return {}
    return {evaluation.step: evaluation.metrics[rule.metric]}


def _of(rule: EarlyStop) -> dict[str, Any]:
    return {"metric": rule.metric, "suite": rule.suite, "mode": rule.mode, "min_delta": rule.min_delta}
