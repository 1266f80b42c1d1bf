"""Evaluate a checkpoint: lease it, restore its model into a fresh program, evaluate, record the result beside it.

Only the ledger says which checkpoints have been evaluated; an event or a schedule only says when to check. So a
repeated event changes nothing, and the next check replaces a lost event.
"""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger

from ckpt_tasks.checkpoint.restore.leasing import LEASE_S, leased
from ckpt_tasks.checkpoint.restore.reading import Run, open_run
from ckpt_tasks.checkpoint.transfer.export import export_checkpoint
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError
from ckpt_tasks.flows.prefect.console_log import keep_log_readers_out
from ckpt_tasks.flows.prefect.events import announce_evaluation
from ckpt_tasks.flows.prefect.isolation import keep_threads_out_of_streams
from ckpt_tasks.flows.session.local_session import find_named, find_program, measure
from ckpt_tasks.flows.session.parameters import effective_params
from ckpt_tasks.flows.session.session import ProgramSession
from ckpt_tasks.format.ledger import lineage
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.storage.locations import Location

# A function to call with the numbers of finished and known evaluations; set in the thread that runs the flow.
evaluation_watcher: ContextVar[Callable[[int, int], None] | None] = ContextVar(
    "ckpt_tasks_evaluation_watcher", default=None
)
_ROUND = 16  # Before each round of this many checkpoints, look for new commits.
_LOOK_S = 0.5
_RELEASED_S = 120.0  # A preempted flow run has usually started again in this time.
_IDENTITY = re.compile(r"[0-9a-f]{32}")

# Random streams belong to the process, and a gang takes one order after the other: only one thread evaluates.
_COMPUTE_LOCK = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The result of a suite's evaluation of a checkpoint.

    `outcome` is "recorded" (by this evaluation), "known" (it was recorded before; nothing changed), or "pruned" (the
    checkpoint is gone; nothing was measured).
    """

    step: int
    suite: str
    manifest_digest: str
    metrics: Mapping[str, float]
    outcome: str

    @property
    def new(self) -> bool:
        """True if this evaluation recorded the result."""
        return self.outcome == "recorded"


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """The evaluation of a run's checkpoints: in this process, or in the ranks of a session."""

    run_key: str
    location: Location
    program: str
    suite: str
    holder: str
    params: Mapping[str, Any] = field(default_factory=dict)
    session: ProgramSession | None = None

    def open(self) -> Run:
        """Open the run to evaluate; raises CheckpointNotFoundError and RunMismatchError."""
        return open_run(self.location, self.run_key)

    def open_for(self, which: int | str, wait_s: float = 0.0) -> Run | None:
        """Open the run. If `which` is "pending" and the run does not exist, wait `wait_s` seconds, then return None.

        A flow run that follows a training may start first. Raises CheckpointNotFoundError for any other `which`.
        """
        until_s = time.monotonic() + wait_s
        while True:
            try:
                return self.open()
            except CheckpointNotFoundError:
                if which != "pending":
                    raise
                if time.monotonic() >= until_s:
                    return None
            time.sleep(_LOOK_S)

    def evaluate(self, checkpoint: Checkpoint) -> EvaluationResult:
        """Evaluate a checkpoint once, record the result and send the event; the outcome is "pruned" if it is gone."""
        run = self.open()
        try:
            asked = (self.program, self.params, self.suite)
            result = evaluate_checkpoint(run, checkpoint, *asked, holder=self.holder, session=self.session)
        except CheckpointNotFoundError:
            return _result(checkpoint, self.suite, {}, "pruned")
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # The frames hold models, and the flow keeps the error.
            raise
        if result.new:
            announce_evaluation(run, self.location.url, checkpoint, self.suite, result.metrics)
        return result


class Rounds:
    """Finds pending checkpoints in rounds, at most `limit` in all, until none is pending for `follow_s` seconds."""

    def __init__(self, limit: int | None, follow_s: float):
        if limit is not None and limit < 1:
            raise ConfigError(f"limit must be a whole number from 1 on or None, not {limit}")
        if not 0 <= follow_s < float("inf"):
            raise ConfigError(f"follow_s must be a number of seconds from 0 on, not {follow_s}")
        self.tried: set[str] = set()
        self._limit = limit
        self._follow_s = follow_s

    def look(self, run: Run, suite: str) -> Iterator[list[Checkpoint]]:
        """Yield lists of checkpoints that a suite has not evaluated, newest first; none twice, even after an error.

        Ends when nothing was pending for `follow_s` seconds, or sooner if the owner of a trained run has released it:
        the next start of the training starts another flow run like this.
        """
        until_s, held, trained = time.monotonic() + self._follow_s, False, False
        while self._limit is None or len(self.tried) < self._limit:
            state = run.head().state
            known = self.tried | {result.manifest_digest for result in state.evaluations if result.suite == suite}
            left = _ROUND if self._limit is None else min(_ROUND, self._limit - len(self.tried))
            pending = [each for each in lineage(state.live) if each.manifest_digest not in known][:left]
            before, held = held, state.owner is not None and not state.owner.released
            # True if a process trains the run, or if new checkpoints came while this flow run followed it.
            trained = trained or held or (bool(pending) and bool(self.tried))
            if pending:
                self.tried |= {checkpoint.manifest_digest for checkpoint in pending}
                yield pending
            if pending or held != before:
                patience_s = min(_RELEASED_S, self._follow_s) if trained and not held else self._follow_s
                until_s = time.monotonic() + patience_s
            elif time.monotonic() >= until_s:
                return
            else:
                time.sleep(_LOOK_S)


def choose_checkpoints(run: Run, which: int | str) -> Checkpoint | None:
    """Return the checkpoint that `which` names: as in `Run.find`, or by identity; None if that identity is gone."""
    if isinstance(which, str) and _IDENTITY.fullmatch(which):
        return next((each for each in run.checkpoints() if each.manifest_digest == which), None)
    return run.find(which)


def evaluate_checkpoint(
    run: Run,
    checkpoint: Checkpoint,
    program: str,
    params: Mapping[str, Any] | None,
    suite: str,
    *,
    holder: str,
    lease_s: float = LEASE_S,
    session: ProgramSession | None = None,
) -> EvaluationResult:
    """Evaluate a checkpoint once per suite; a second call returns the recorded result and changes nothing.

    Builds the program with `params`, and with the run's recorded parameters for all others (`effective_params`).
    Restores only its modules (its whole state if it has none). The ranks of `session`, if given, do this together, with
    the program and parameters of the session. Raises ProgramError, CheckpointNotFoundError if the
    checkpoint has been pruned, and what the restore raises.
    """
    recorded = recorded_evaluation(run, checkpoint, suite)
    if recorded is not None:
        return recorded
    with leased(run, checkpoint, holder, lease_s):
        with _COMPUTE_LOCK:
            if session is not None:
                metrics = session.evaluate(checkpoint, suite)
            else:
                built_with = effective_params(find_program(program), run.head().state.params, params)
                keep_threads_out_of_streams()
                keep_log_readers_out()
                metrics = measure(run, checkpoint, program, built_with, suite)
        new = run.record_evaluation(checkpoint, suite, metrics)
    if not new and (recorded := recorded_evaluation(run, checkpoint, suite)):
        return recorded  # Another evaluator has recorded it meanwhile.
    return _result(checkpoint, suite, metrics, "recorded" if new else "known")


def recorded_evaluation(run: Run, checkpoint: Checkpoint, suite: str) -> EvaluationResult | None:
    """Return the recorded result of a suite for a checkpoint; None if the suite has not evaluated it."""
    for evaluation in run.evaluations():
        if evaluation.suite == suite and evaluation.manifest_digest == checkpoint.manifest_digest:
            return _result(checkpoint, suite, evaluation.metrics, "known")
    return None


def _result(checkpoint: Checkpoint, suite: str, metrics: Mapping[str, float], outcome: str) -> EvaluationResult:
    return EvaluationResult(
        step=checkpoint.step,
        suite=suite,
        manifest_digest=checkpoint.manifest_digest,
        metrics=metrics,
        outcome=outcome,
    )


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """A call of "module:function" `name` as function(run, checkpoint, result, **params) for the best checkpoint.

    The function may be called more than once for a checkpoint; `checkpoint.manifest_digest` identifies it.
    """

    evaluator: Evaluator
    name: str
    params: Mapping[str, Any]

    def check(self, run: Run) -> None:
        """Raise ConfigError if the function cannot be imported, or if the run has no `best_metric`."""
        _find(self.name)
        if run.head().state.best_metric is None:
            raise ConfigError(
                "the run has no best_metric, so it has no best checkpoint", hint="Train it with best_metric."
            )

    def of_best(self, looked_at: Sequence[EvaluationResult]) -> None:
        """Call the function with the leased best checkpoint if it is in `looked_at`; raise the function's error."""
        run, results = self.evaluator.open(), {result.manifest_digest: result for result in looked_at}
        try:
            best = run.find("best")
        except CheckpointNotFoundError:
            return  # No checkpoint has the metric yet.
        result = results.get(best.manifest_digest)
        if result is None:
            return
        with leased(run, best, f"promotion, {self.evaluator.holder}"):
            _find(self.name)(run, best, result, **self.params)
        get_run_logger().info("Step %d is the best checkpoint: %s was called with it", best.step, self.name)


def _find(name: str) -> Callable[..., object]:
    return find_named(name, what="promotion", kind="function", error=ConfigError)


def export_best(run: Run, checkpoint: Checkpoint, result: EvaluationResult, *, out: str) -> None:
    """Write the checkpoint's modules to the safetensors file `out`, or replace it; `out` may contain "{run_key}".

    Readers see the old file or the new one, never part of it.
    """
    target = Path(out.replace("{run_key}", run.run_key or ""))
    target.parent.mkdir(parents=True, exist_ok=True)
    export_checkpoint(run.history.store, checkpoint, target, overwrite=True)
