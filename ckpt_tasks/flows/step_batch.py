"""A step-batch: one Prefect task that restores if needed, trains up to a step, and ends with a commit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prefect import Task
from prefect.logging import get_run_logger

from ckpt_tasks.flows.prefect.attempts import Attempts, attempted_task
from ckpt_tasks.flows.prefect.config import BatchLength
from ckpt_tasks.flows.session.session import ProgramSession

_MAX_STALLED_ATTEMPTS = 10


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The result of a batch: its steps, its last metrics, its time, and how long training waited for its commit."""

    start: int
    end: int
    metrics: Mapping[str, float]
    seconds: float
    commit_s: float


def step_batch(session: ProgramSession, retries: int, retry_delay_seconds: float) -> Task[[int, int], BatchResult]:
    """Make the task that trains from one step to another; call the task, do not submit it: then signals reach it."""
    attempts = Attempts(session, counted=False, max_stalled=_MAX_STALLED_ATTEMPTS)

    def steps(start: int, end: int) -> BatchResult:
        started = time.perf_counter()
        attempts.run(session.run, end)
        commit = session.last_commit
        done = BatchResult(
            start=start,
            end=session.position,
            metrics=session.metrics,
            seconds=time.perf_counter() - started,
            commit_s=commit.cost_s if commit else 0.0,
        )
        on = f" on {session.ranks} ranks" if session.ranks > 1 else ""
        report = ", ".join(f"{name} {value:.4g}" for name, value in done.metrics.items())
        get_run_logger().info(
            "Step %d committed%s after %.1f s: %s", done.end, on, done.seconds, report or "no metrics"
        )
        return done

    name = "steps {start} to {end}"  # "to", no en dash: Prefect's page of a run leaves it out.
    return attempted_task(
        steps, name="steps", task_run_name=name, retries=retries, retry_delay_seconds=retry_delay_seconds
    )


def run_in_batches(
    batch: Task[[int, int], BatchResult], session: ProgramSession, steps: tuple[int, int], length: BatchLength
) -> Iterator[BatchResult]:
    """Train from one step to another, one task per batch; a batch after a successful one needs no restore."""
    (position, last_step), last = steps, None
    while position < last_step:
        end = length.end(position, last_step, step_s=session.step_s, last=last)
        done = batch(position, end)
        position, last = done.end, done.end - done.start
        yield done
