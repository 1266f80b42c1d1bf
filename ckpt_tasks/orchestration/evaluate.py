"""An evaluation: lease a checkpoint, restore its model into a fresh program, evaluate, record the result beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_tasks.checkpoint.reading import Run
from ckpt_tasks.errors import ProgramError
from ckpt_tasks.format.ledger import Checkpoint
from ckpt_tasks.gang.local import build_program

__all__ = ["EvaluationResult", "evaluate_checkpoint"]


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What a suite measured on a checkpoint; `new` is False where it had been recorded before."""

    step: int
    suite: str
    metrics: Mapping[str, float]
    new: bool


def evaluate_checkpoint(
    run: Run, checkpoint: Checkpoint, program: str, params: Mapping[str, Any] | None, suite: str, *, holder: str
) -> EvaluationResult:
    """Evaluate a checkpoint once per suite; a second call returns what is recorded and changes nothing.

    Only the program's modules are restored. Raises ProgramError, and what the restore raises.
    """
    recorded = _recorded(run, checkpoint, suite)
    if recorded is not None:
        return EvaluationResult(step=checkpoint.step, suite=suite, metrics=recorded, new=False)
    with run.lease(checkpoint, holder):
        fresh = build_program(program, params)
        if not callable(getattr(fresh, "evaluate", None)):
            raise ProgramError(f"{program} has no evaluate(suite)", key=program)
        modules = {name: value for name, value in fresh.state.items() if isinstance(value, torch.nn.Module)}
        run.restore(checkpoint, modules or fresh.state, partial=True)
        metrics = {str(name): float(value) for name, value in fresh.evaluate(suite).items()}
        new = run.record_evaluation(checkpoint, suite, metrics)
    if not new:  # another evaluator was faster: what is recorded counts
        metrics = dict(_recorded(run, checkpoint, suite) or metrics)
    return EvaluationResult(step=checkpoint.step, suite=suite, metrics=metrics, new=new)


def _recorded(run: Run, checkpoint: Checkpoint, suite: str) -> Mapping[str, float] | None:
    for evaluation in run.evaluations():
        if evaluation.suite == suite and evaluation.manifest_digest == checkpoint.manifest_digest:
            return evaluation.metrics
    return None
