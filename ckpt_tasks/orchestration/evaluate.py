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
from ckpt_tasks.state.rng import undisturbed

__all__ = ["EvaluationResult", "evaluate_checkpoint", "recorded_evaluation"]


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
    recorded = recorded_evaluation(run, checkpoint, suite)
    if recorded is not None:
        return recorded
    with run.lease(checkpoint, holder), undisturbed():
        fresh = build_program(program, params)
        if not callable(getattr(fresh, "evaluate", None)):
            raise ProgramError(f"{program} has no evaluate(suite)", key=program)
        modules = {name: value for name, value in fresh.state.items() if isinstance(value, torch.nn.Module)}
        run.restore(checkpoint, modules or fresh.state, partial=True)
        metrics = {str(name): float(value) for name, value in fresh.evaluate(suite).items()}
        new = run.record_evaluation(checkpoint, suite, metrics)
    if not new and (recorded := recorded_evaluation(run, checkpoint, suite)):
        return recorded  # another evaluator was faster
    return EvaluationResult(step=checkpoint.step, suite=suite, metrics=metrics, new=new)


def recorded_evaluation(run: Run, checkpoint: Checkpoint, suite: str) -> EvaluationResult | None:
    """Return what is recorded of a suite for a checkpoint, None where that is nothing."""
    for one in run.evaluations():
        if one.suite == suite and one.manifest_digest == checkpoint.manifest_digest:
            return EvaluationResult(step=one.step, suite=suite, metrics=one.metrics, new=False)
    return None
