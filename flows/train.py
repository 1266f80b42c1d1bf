"""Train a program as a flow that can be killed anywhere: `python -m flows.train`, or the deployment `train/byte-lm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.config import CheckpointConfig
from ckpt_tasks.gang.local import LocalSession
from ckpt_tasks.orchestration.artifacts import publish_run
from ckpt_tasks.orchestration.config import BatchLength, config_of_run
from ckpt_tasks.orchestration.step_batch import run_in_batches, step_batch


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Where the run stands, how many steps this flow run trained, and the last metrics (none if it trained none)."""

    run_key: str
    step: int
    trained: int
    metrics: Mapping[str, float]


@flow(name="train", flow_run_name="{run_key}", persist_result=False)
def train(
    *,
    run_key: str,
    total_steps: int,
    checkpoint: CheckpointConfig,
    program: str = "flows.programs.byte_lm:ByteLM",
    params: dict[str, Any] | None = None,
    batch_steps: int | None = None,
    batch_seconds: float = 30.0,
    retries: int = 3,
    retry_delay_s: float = 2.0,
) -> TrainResult:
    """Train `program` ("module:Factory", called with `params`) until `total_steps` steps are committed.

    The run is cut into batches of `batch_steps` steps, or of about `batch_seconds`. Each is one task: it restores if it
    has to, trains, and ends with a commit; a failed one is retried up to `retries` times, after `retry_delay_s`
    seconds, then twice that, and so on. Whatever ended this flow run, another one with the same `run_key` and directory
    goes on from the newest good checkpoint.
    """
    config = config_of_run(checkpoint, run_key)
    length = BatchLength(steps=batch_steps, seconds=batch_seconds, step_interval=config.step_interval)
    trained = 0
    # Within the block SIGTERM and Ctrl-C wait for the end of the step, and for its commit.
    with Checkpointer(config, flow_run_id=flow_run.id) as ckpt:
        session = LocalSession(ckpt, program, params)
        batch_task = step_batch(session, retries=retries, retry_delay_s=retry_delay_s)
        for batch in run_in_batches(batch_task, session, total_steps, length):
            trained += batch.end - batch.start
        publish_run(ckpt, run_key)
    return TrainResult(run_key=run_key, step=total_steps, trained=trained, metrics=session.metrics)


if __name__ == "__main__":
    from flows.console import main
    from flows.evaluate import evaluate

    raise SystemExit(main(train, evaluate))
