"""Evaluate a committed checkpoint: `python -m flows.evaluate`, or the deployment `evaluate/byte-lm`."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from ckpt_tasks.checkpoint.config import CheckpointConfig
from ckpt_tasks.checkpoint.reading import open_run
from ckpt_tasks.orchestration.config import config_of_run
from ckpt_tasks.orchestration.evaluate import EvaluationResult, evaluate_checkpoint
from ckpt_tasks.orchestration.hooks import attempted_task


@flow(name="evaluate", flow_run_name="{run_key} {which} {suite}", persist_result=False)
def evaluate(
    *,
    run_key: str,
    checkpoint_dir: str,
    program: str = "flows.programs.byte_lm:ByteLM",
    params: dict[str, Any] | None = None,
    which: int | str = "latest",
    suite: str = "quick",
    retries: int = 2,
) -> EvaluationResult:
    """Evaluate the checkpoint `which` (a step, "latest" or "best") by `suite`, and record the result beside it.

    The checkpoint is kept from being pruned meanwhile, and only its model is restored. Once per checkpoint and suite: a
    second call returns what is recorded, and changes nothing.
    """
    config = config_of_run(CheckpointConfig(checkpoint_dir=checkpoint_dir), run_key)
    run = open_run(config.checkpoint_dir, run_key)
    checkpoint = run.find(which)

    def evaluation(step: int, suite: str) -> EvaluationResult:
        holder = f"evaluation {suite}, flow run {flow_run.id}"
        return evaluate_checkpoint(run, checkpoint, program, params, suite, holder=holder)

    name = "{suite} on step {step}"
    return attempted_task(evaluation, task_run_name=name, retries=retries, retry_delay_s=2.0)(checkpoint.step, suite)


if __name__ == "__main__":
    from flows.console import main_evaluate

    raise SystemExit(main_evaluate(evaluate))
