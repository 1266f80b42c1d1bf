"""The metrics of a step as plain numbers, and what to do if a number is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tasks.errors import NonFiniteError, SpikeError, StateError
from ckpt_tasks.format.records import Checkpoint

_MOST_ROLLBACKS = 3


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers; raise StateError that names a value that is not a number."""
    return {str(name): number_of(str(name), value) for name, value in metrics.items()}


def held(metrics: Mapping[str, Any], step: int | None = None) -> dict[str, Any]:
    """Return metrics as plain numbers; copy tensors on a device, because reading them would wait for the device.

    Raises StateError that names a value which is not a number.
    """
    if not isinstance(metrics, Mapping):
        raise StateError(f"metrics are numbers by name, not {metrics!r:.80}", step=step)
    return {
        str(name): number_of(str(name), value) if is_here(value) else value.detach().clone()
        for name, value in metrics.items()
    }


@dataclass
class GoingBack:
    """Decides how far the next restore goes back, after steps whose metrics were not finite or had spiked.

    `failed_step`: the last bad step, before which the next restore must go, or None. `began`: the first step of a spike
    that ends at `failed_step`. `furthest`: the highest bad step that training has not passed yet. `limit`: the step of
    the last rollback; the next one must go back further.
    """

    failed_step: int | None = None
    furthest: int = -1
    rollbacks: int = 0
    limit: int | None = None
    began: int | None = None

    @property
    def event(self) -> dict[str, int]:
        """The facts about a spike for the ledger event of a rollback."""
        return {} if self.began is None else {"began": self.began}

    def failed(self, step: int, began: int | None = None) -> None:
        """Remember a bad step, or the bad steps since `began`."""
        self.failed_step, self.furthest, self.began = step, max(step, self.furthest), began

    def passed(self, step: int) -> None:
        """Forget the rollbacks if a good step is beyond the bad ones."""
        self.failed_step = None
        if step > self.furthest:
            self.rollbacks, self.limit = 0, None

    def older(self, candidates: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints with finite metrics before the bad step and before the last rollback.

        Raises NonFiniteError if no such checkpoint exists, or after three rollbacks that did not get past the bad step.
        """
        assert self.failed_step is not None
        bad = self.failed_step if self.began is None else self.began
        limit = bad if self.limit is None else min(bad, self.limit)
        good = [c for c in candidates if c.step < limit and all(map(math.isfinite, c.metrics.values()))]
        if self.rollbacks >= _MOST_ROLLBACKS or not good:
            why = f"{self.rollbacks} rollbacks did not help" if good else "there is no older checkpoint to go back to"
            kind, what = (NonFiniteError, "is NaN or infinite") if self.began is None else (SpikeError, "has spiked")
            raise kind(
                f"a metric {what} again, and {why}",
                step=self.failed_step,
                hint="Change what makes it diverge: a program that is deterministic does the same again.",
            )
        return good

    def went_back(self, step: int) -> int | None:
        """Count a restore of `step` as a rollback if there was a bad step; return that step, else None."""
        failed_step, self.failed_step = self.failed_step, None
        if failed_step is not None:
            self.rollbacks, self.limit = self.rollbacks + 1, step
        return failed_step


def is_here(value: Any) -> bool:
    """Return True unless a value is a tensor on a device; a run is read without torch, so no type is asked."""
    return bool(getattr(value, "is_cpu", True))


def number_of(name: str, value: Any) -> float:
    """Return a metric as a plain number; raise StateError that names it if it is none."""
    if type(value) is float:
        return value
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        hint = "Give one number under each name, such as float(loss.mean())."
        raise StateError(f"a metric is one number, not {value!r:.80}", key=name, hint=hint) from error
