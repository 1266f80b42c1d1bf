"""Promotion: a function of the user's, called with the checkpoint that an evaluation made the best one of its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger

from ckpt_tasks.copying.export import export_checkpoint
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError
from ckpt_tasks.format.ledger import Checkpoint
from ckpt_tasks.orchestration.evaluate import EvaluationResult, Evaluator
from ckpt_tasks.reading.leasing import leased
from ckpt_tasks.reading.reading import Run
from ckpt_tasks.session.local import find_named

__all__ = ["Promotion", "export_best"]


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """Call "module:function" `name` as function(run, checkpoint, result, **params) with the run's best checkpoint.

    It is called at least once for every new best one, and may be called again for the same one: what tells them apart
    is `checkpoint.manifest_digest`.
    """

    evaluator: Evaluator
    name: str
    params: Mapping[str, Any]

    def check(self, run: Run) -> None:
        """Raise ConfigError where the name leads nowhere, or the run does not say what its best checkpoint is."""
        _find(self.name)
        if run.head().state.best_metric is None:
            raise ConfigError(
                "the run does not say by which metric a checkpoint is the best", hint="Train it with best_metric."
            )

    def of_best(self, looked_at: Sequence[EvaluationResult]) -> None:
        """Promote the best checkpoint if it is one of those that were looked at, leased; raise what that raises."""
        run, results = self.evaluator.open(), {one.manifest_digest: one for one in looked_at}
        try:
            best = run.find("best")
        except CheckpointNotFoundError:
            return  # none has the metric yet
        result = results.get(best.manifest_digest)
        if result is None:
            return
        with leased(run, best, f"promotion, {self.evaluator.holder}"):
            _find(self.name)(run, best, result, **self.params)
        get_run_logger().info("Step %d is the best one, and %s was called with it", best.step, self.name)


def _find(name: str) -> Callable[..., object]:
    return find_named(name, what="promotion", kind="function", error=ConfigError)


def export_best(run: Run, checkpoint: Checkpoint, result: EvaluationResult, *, out: str) -> None:
    """Write the checkpoint's modules as the safetensors file `out`, which may hold "{run_key}", over the one before.

    Readers see the old file or the new one, never part of it.
    """
    target = Path(out.replace("{run_key}", run.run_key or ""))
    target.parent.mkdir(parents=True, exist_ok=True)
    export_checkpoint(run.history.store, checkpoint, target, overwrite=True)
