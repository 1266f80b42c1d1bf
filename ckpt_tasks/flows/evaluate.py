"""Evaluate committed checkpoints: `python -m flows.evaluate`, or the deployment `evaluate/byte-lm`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from prefect import Task, flow
from prefect.futures import as_completed
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.flows.engines import find_engine
from ckpt_tasks.flows.gang.engine import Engine
from ckpt_tasks.flows.prefect.attempts import attempted_task
from ckpt_tasks.flows.prefect.config import check_evaluation, config_of_run
from ckpt_tasks.flows.prefect.evaluate import (
    EvaluationResult,
    Evaluator,
    Promotion,
    Rounds,
    choose_checkpoints,
    evaluation_watcher,
)
from ckpt_tasks.flows.prefect.events import absolute
from ckpt_tasks.flows.prefect.starts import leave_to_follower
from ckpt_tasks.flows.session.local_session import find_program
from ckpt_tasks.flows.session.parameters import effective_params
from ckpt_tasks.flows.session.session import ProgramSession
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.storage.locations import Location

_RETRY_DELAY_S = 2.0
_NAME = "{suite} on step {step}"


@flow(
    name="evaluate",
    flow_run_name="{run_key} {which} {suite}",
    persist_result=False,
    task_runner=ThreadPoolTaskRunner(max_workers=2),  # type: ignore[arg-type]
)
def evaluate(
    *,
    run_key: str,
    checkpoint_dir: str | Location,
    program: str = "ckpt_tasks.programs.byte_lm:ByteLM",
    params: dict[str, Any] | None = None,
    which: int | str = "latest",
    suite: str = "quick",
    limit: int | None = None,
    follow_s: float = 0.0,
    promote: str | None = None,
    promote_params: dict[str, Any] | None = None,
    retries: int = 2,
    ranks: int = 1,
    engine: str = "local",
) -> list[EvaluationResult]:
    """Evaluate checkpoints with `suite`, each once, and record the results beside them.

    `which` is a step, "latest", "best", an identity (manifest digest), or "pending": every committed checkpoint that
    this suite has not evaluated, newest first, `limit` at most. With `follow_s`, "pending" waits so many seconds for a
    run that does not exist yet, and then looks for new commits until none was pending for as long. Pending checkpoints
    are evaluated side by side; the flow raises their errors at its end. No prune removes what is evaluated. A
    checkpoint that is gone is skipped; a recorded result stays. It calls `promote` ("module:function") with the run's
    best checkpoint and `promote_params` if it evaluated that checkpoint or `which` names it. Many `ranks`, which
    `engine` starts, evaluate a checkpoint together, one after the other.
    """
    check_evaluation(which, limit, promote, promote_params, follow_s)
    processes = find_engine(engine, ranks)
    config = config_of_run(CheckpointConfig(checkpoint_dir=checkpoint_dir), run_key)
    if follow_s:
        leave_to_follower(absolute(config.location.url), suite)
    evaluator = Evaluator(
        run_key=run_key,
        location=config.location,
        program=program,
        params=params or {},
        suite=suite,
        holder=f"evaluation {suite}, flow run {flow_run.id}",
    )
    looks = Rounds(limit, follow_s)
    if (run := evaluator.open_for(which, follow_s)) is None:
        return []
    promotion = _promotion(evaluator, run, promote, promote_params)
    with _in_ranks(evaluator, run, config, ranks, processes) as evaluator:
        return _evaluate(evaluator, run, which, looks, promotion=promotion, retries=retries)


@contextmanager
def _in_ranks(
    evaluator: Evaluator, run: Run, config: CheckpointConfig, ranks: int, processes: Engine | None
) -> Iterator[Evaluator]:
    """Give an evaluator the session of an engine's ranks; change nothing without an engine."""
    if processes is None:
        yield evaluator
        return
    from ckpt_tasks.flows.gang.gang_session import GangSession

    built_with = effective_params(find_program(evaluator.program), run.head().state.params, evaluator.params)
    with GangSession(config, evaluator.program, built_with, ranks=ranks, engine=processes) as session:
        session.hold_signals(False)
        yield replace(evaluator, session=session)


def evaluate_in(session: ProgramSession, evaluator: Evaluator) -> EvaluationResult:
    """Evaluate the newest checkpoint in the ranks of a session, as a task of the flow run that has trained."""
    newest = evaluator.open().find("latest")
    session.hold_signals(False)
    task = attempted_task(_evaluation, task_run_name=_NAME, retries=0, retry_delay_seconds=0)
    return task(replace(evaluator, session=session), newest, newest.step, evaluator.suite)


def _evaluate(
    evaluator: Evaluator, run: Run, which: int | str, looks: Rounds, *, promotion: Promotion | None, retries: int
) -> list[EvaluationResult]:
    suite = evaluator.suite
    attempted = partial(attempted_task, retries=retries, retry_delay_seconds=_RETRY_DELAY_S)
    task = attempted(_evaluation, task_run_name=_NAME)
    errors: dict[str, Exception] = {}
    if which == "pending":
        rounds = _side_by_side(task, looks.look(run, suite), evaluator, errors)
    else:
        rounds = _by_name(task, choose_checkpoints(run, which), evaluator)
    results: list[EvaluationResult] = []
    for round_results in rounds:
        results += round_results
        looked_at = [result for result in round_results if result.new or which != "pending"]
        if promotion is not None and looked_at:
            _promote(attempted(promotion.of_best, task_run_name="promotion"), looked_at, errors)
    _raise(errors, suite)
    return results


def _raise(errors: dict[str, Exception], suite: str) -> None:
    if errors:
        failures = "; ".join(f"{where}: {error}" for where, error in errors.items())
        raise ExceptionGroup(f"suite {suite}: {failures}", [*errors.values()])


def _promotion(evaluator: Evaluator, run: Run, name: str | None, params: dict[str, Any] | None) -> Promotion | None:
    if name is None:
        return None
    promotion = Promotion(evaluator=evaluator, name=name, params=params or {})
    promotion.check(run)
    return promotion


def _evaluation(evaluator: Evaluator, checkpoint: Checkpoint, step: int, suite: str) -> EvaluationResult:
    return evaluator.evaluate(checkpoint)


def _promote(task: Task[..., None], looked_at: list[EvaluationResult], errors: dict[str, Exception]) -> None:
    try:
        task(looked_at)
    except Exception as error:  # noqa: BLE001 (the flow raises it after the last round)
        errors["promotion"] = error


def _by_name(
    task: Task[..., EvaluationResult], chosen: Checkpoint | None, evaluator: Evaluator
) -> Iterator[list[EvaluationResult]]:
    if chosen is not None:
        yield [task(evaluator, chosen, chosen.step, evaluator.suite)]


def _side_by_side(
    task: Task[..., EvaluationResult],
    rounds: Iterable[list[Checkpoint]],
    evaluator: Evaluator,
    errors: dict[str, Exception],
) -> Iterator[list[EvaluationResult]]:
    """Evaluate round after round on the flow's task runner; collect the errors by step."""
    on_progress, done, known = evaluation_watcher.get(), 0, 0
    for pending in rounds:
        known += len(pending)
        futures = [task.submit(evaluator, checkpoint, checkpoint.step, evaluator.suite) for checkpoint in pending]
        steps = {future.task_run_id: checkpoint.step for future, checkpoint in zip(futures, pending, strict=True)}
        results = []
        for future in as_completed(futures):
            try:
                results.append(future.result())
            except Exception as error:  # noqa: BLE001 (the flow raises it after the last round)
                errors[f"step {steps[future.task_run_id]}"] = error
            done += 1
            if on_progress:
                on_progress(done, known)
        yield results
