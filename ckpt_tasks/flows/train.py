"""Train a program as a flow that may be killed at any time: `ckpt train`, or the deployment `train/byte-lm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from ckpt_tasks.checkpoint.acquiring import await_store_of
from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.flows.engines import find_engine
from ckpt_tasks.flows.gang.engine import Engine
from ckpt_tasks.flows.gang.launched import launched
from ckpt_tasks.flows.prefect.artifacts import RunPages
from ckpt_tasks.flows.prefect.config import BatchLength, check_saves, config_of_run, position_of_run
from ckpt_tasks.flows.prefect.console_log import keep_log_readers_out
from ckpt_tasks.flows.prefect.early_stop import EarlyStopping, stay_as_decided
from ckpt_tasks.flows.prefect.endings import (
    crashes_for_its_launcher,
    crashes_while_the_api_is_away,
    crashes_while_the_store_is_away,
    ends_quietly_for_a_sibling,
    ends_when_cancelled,
    skip_while_the_run_trains,
)
from ckpt_tasks.flows.prefect.events import announce, delivers_events
from ckpt_tasks.flows.prefect.starts import crash_lost_task_runs, logged_with_the_flow_run
from ckpt_tasks.flows.session.forked import check_program, fork_run, recorded_params, roll_back
from ckpt_tasks.flows.session.local_session import LocalSession, find_program
from ckpt_tasks.flows.session.parameters import effective_params
from ckpt_tasks.flows.session.session import ProgramSession, at_end
from ckpt_tasks.flows.step_batch import run_in_batches, step_batch
from ckpt_tasks.format.policy.stopping import EarlyStop
from ckpt_tasks.run.ledger.config import CheckpointConfig


@dataclass(frozen=True)
class TrainResult:
    """The run's position, how many steps this flow run trained, and its last metrics (empty if it trained no step).

    `stopped_because` is the reason of an early stop; None without one.
    """

    run_key: str
    step: int
    trained: int
    metrics: Mapping[str, float]
    stopped_because: str | None = None


@flow(name="train", flow_run_name="{run_key} to {total_steps}", persist_result=False)
def train(
    *,
    run_key: str,
    total_steps: int,
    checkpoint: CheckpointConfig,
    program: str = "ckpt_tasks.programs.byte_lm:ByteLM",
    params: dict[str, Any] | None = None,
    batch_steps: int | None = None,
    batch_seconds: float = 30.0,
    retries: int = 3,
    retry_delay_seconds: float = 2.0,
    early_stop: EarlyStop | None = None,
    fork_from: str | None = None,
    rollback_to: int | None = None,
    skip_batches: str | None = None,
    ranks: int = 1,
    engine: str = "local",
    min_ranks: int | None = None,
) -> TrainResult:
    """Train `program` ("module:Factory", called with `params`) until `total_steps` steps are committed.

    The flow cuts the run into batches of `batch_steps` steps, or else of about `batch_seconds`. Each batch is a task
    that restores if needed, trains, and commits. A failed batch is retried up to `retries` times. However this flow run
    ends, another with the same `run_key` and directory resumes the run. If the store or Prefect's API does not answer,
    this flow run crashes, and is resumed. A new run begins with `fork_from` ("DIR@STEP"). `rollback_to` goes back to a
    step, once, and skips `skip_batches` ("401-410"). `early_stop` ends the flow run after a batch.
    """
    keep_log_readers_out()
    with crashes_while_the_api_is_away(), crashes_while_the_store_is_away(reached=True):
        stay_as_decided()
        processes = find_engine(engine, ranks, min_ranks)  # An unreadable block raises StoreError.
    with logged_with_the_flow_run(), crashes_while_the_store_is_away(reached=False):
        config = config_of_run(checkpoint, run_key)
        params = _begin(config, program, params, fork_from, (rollback_to, skip_batches))
    length = BatchLength(steps=batch_steps, seconds=batch_seconds, step_interval=config.step_interval)
    crash_lost_task_runs()
    with (  # SIGTERM, Ctrl-C and a cancellation wait for the end of the step and its commit.
        ends_when_cancelled(),
        logged_with_the_flow_run(),
        delivers_events(),
        crashes_while_the_store_is_away(reached=True),
        ends_quietly_for_a_sibling(config, flow_run.id),
        _session(config, program, params, ranks, processes) as session,
        RunPages(session, run_key, total_steps, ranks, lambda: session.gangs) as pages,
    ):
        announce(session, run_key, program=program, params=params)
        stopping = EarlyStopping(session, early_stop)
        batch_task = step_batch(session, 0 if launched.get() else retries, retry_delay_seconds)
        begun = step = position_of_run(session.config, total_steps)
        for batch in run_in_batches(batch_task, session, (begun, total_steps), length):
            pages.show(step := batch.end, batch.metrics)
            if stopping.check():
                break
        at_end.get()(session)
    if stopping.why:
        get_run_logger().warning("The run is %s. Another start trains on.", stopping.why)
    elif step == begun:
        get_run_logger().warning("Nothing was left to train to step %d: step %d is committed.", total_steps, step)
    return TrainResult(run_key, step, step - begun, session.metrics, stopping.why)


@contextmanager
def _session(
    config: CheckpointConfig, program: str, params: dict[str, Any], ranks: int, processes: Engine | None
) -> Iterator[ProgramSession]:
    """Open the session of a program: one rank runs in this process, several in processes of an engine or a launcher."""
    if place := launched.get():
        with crashes_for_its_launcher(), place.lead(config, program, params, flow_run.id) as leading:
            yield leading
        return
    if processes is None:
        with Checkpointer(config, flow_run_id=flow_run.id) as ckpt:
            yield LocalSession(ckpt, program, params)
        return
    from ckpt_tasks.flows.gang.gang_session import GangSession

    with GangSession(config, program, params, ranks=ranks, engine=processes, flow_run_id=flow_run.id) as session:
        yield session


def _begin(
    config: CheckpointConfig,
    program: str,
    params: dict[str, Any] | None,
    fork_from: str | None,
    back: tuple[int | None, str | None],
) -> dict[str, Any]:
    """Check the program against the run, after a fork or a rollback if requested; return the program's parameters.

    `back` is the step to roll back to, and the batches to skip.
    """
    check_saves(config)
    if back[0] is None and back[1] is not None:
        raise ConfigError("skip_batches needs rollback_to: the batches after which step?")
    if flow_run.run_count == 1:  # A later start is resumed, and its store may be away for minutes.
        await_store_of(config)
    skip_while_the_run_trains(config)
    factory = find_program(program)
    check_program(config, program)
    if fork_from is not None:
        fork_run(fork_from, config, params)
    built_with = effective_params(factory, recorded_params(config), params)
    find_program(program, built_with)
    roll_back(config, *back, flow_run.id)
    return built_with
