"""The metrics of a step as plain numbers, and what to do if a number is not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tasks.errors import NonFiniteError, SpikeError, StateError
from ckpt_tasks.format.records import Checkpoint

_MOST_ROLLBACKS = 3

_log = logging.getLogger("ckpt_tasks")
_WARNING = (
    "Step %d: %s; training continues, and such a step is never the best one. on_non_finite='stop' would end training "
    "here, and 'rollback' would go back to an older checkpoint"
)


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers; raise StateError that names a value that is not a number."""
    return {str(name): _number(str(name), value) for name, value in metrics.items()}


def held(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as plain numbers; copy tensors on a device, because reading them would wait for the device.

    Raises StateError that names a value which is not a number.
    """
    return {
        str(name): _number(str(name), value) if _is_here(value) else value.detach().clone()
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


class FiniteMetrics:
    """Checks the metrics of every step; warns, stops or goes back if a metric is NaN or infinite.

    Consecutive bad steps give one warning. A tensor on a device is checked only when its step is saved, since reading
    it waits for the device, and the save reads it anyway.
    """

    def __init__(self, on_non_finite: str):
        self.back = GoingBack()
        self._on_non_finite = on_non_finite
        self._warned = False

    def check(self, step: int, metrics: Mapping[str, Any], *, saving: bool) -> None:
        """Warn or raise NonFiniteError, by `on_non_finite`, if a metric is NaN or infinite.

        A finite step ends a stretch of bad steps. `saving`: also check tensors on a device. Raises StateError for a
        metric that is not a number.
        """
        if not isinstance(metrics, Mapping):
            raise StateError(f"metrics are numbers by name, not {metrics!r:.80}", step=step)
        numbers = {str(name): _number(str(name), value) for name, value in metrics.items() if saving or _is_here(value)}
        bad = [name for name, value in numbers.items() if not math.isfinite(value)]
        if bad:
            self._act(step, ", ".join(f"{name} is {numbers[name]}" for name in bad), bad[0])
        elif numbers:  # A step without metrics does not end consecutive bad steps.
            self._warned = False
            self.back.passed(step)

    def spiked(self, key: str, began: int, step: int) -> SpikeError:
        """Return the error for a metric that spiked in these steps; the next restore goes back before them."""
        self.back.failed(step, began)
        message = f"{key} has spiked since step {began}, and on_spike goes back: this step is not saved"
        hint = "Call restore(): it goes back to the newest checkpoint before the spike."
        error = SpikeError(message, step=step, key=key, hint=hint)
        error.rolls_back, error.began = True, began
        return error

    def _act(self, step: int, message: str, key: str) -> None:
        if self._on_non_finite == "warn":
            if not self._warned:
                _log.warning(_WARNING, step, message)
            self._warned = True
            return
        hint = "The checkpoints before it stand. Restore an older one, and change what made it diverge."
        if self._on_non_finite == "rollback":
            self.back.failed(step)
            hint = "Call restore(): it goes back to the newest checkpoint with finite metrics."
        message = f"{message}, and on_non_finite is {self._on_non_finite!r}: this step is not saved"
        error = NonFiniteError(message, step=step, key=key, hint=hint)
        error.rolls_back = self._on_non_finite == "rollback"
        raise error


def _is_here(value: Any) -> bool:
    """Return True unless a value is a tensor on a device; a run is read without torch, so no type is asked."""
    return bool(getattr(value, "is_cpu", True))


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        hint = "Give one number under each name, such as float(loss.mean())."
        raise StateError(f"a metric is one number, not {value!r:.80}", key=name, hint=hint) from error
