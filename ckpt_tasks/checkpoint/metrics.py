"""Metrics of a step: plain numbers, and what to do where one of them is not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from ckpt_tasks.errors import NonFiniteError, StateError

__all__ = ["FiniteMetrics", "checked_metrics"]

_log = logging.getLogger("ckpt_tasks")


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers; raise StateError naming the one that is none."""
    return {str(name): _number(str(name), value) for name, value in metrics.items()}


class FiniteMetrics:
    """Look at the metrics of every step, and warn or stop where one is NaN or infinite.

    A stretch of such steps is one warning. A tensor on a device is looked at only when its step is saved, which reads
    it anyway: reading waits for the device.
    """

    def __init__(self, on_non_finite: str):
        self._stops = on_non_finite == "stop"
        self._warned = False

    def check(self, step: int, metrics: Mapping[str, Any], *, saving: bool) -> None:
        """Raise NonFiniteError, or warn once a stretch; `saving`: also read what lies on a device."""
        numbers = {
            str(name): _number(str(name), value)
            for name, value in metrics.items()
            if saving or not isinstance(value, torch.Tensor) or value.is_cpu
        }
        bad = [name for name, value in numbers.items() if not math.isfinite(value)]
        if not bad:
            self._warned = self._warned and not numbers  # a step that says nothing does not end a stretch
            return
        said = ", ".join(f"{name} is {numbers[name]}" for name in bad)
        if self._stops:
            raise NonFiniteError(
                f"{said}, and on_non_finite is 'stop': this step is not saved",
                step=step,
                key=bad[0],
                hint="The checkpoints before it stand. Restore an older one, and change what made it diverge.",
            )
        if not self._warned:
            _log.warning("Step %d: %s; training goes on, and such a step is never the best one", step, said)
        self._warned = True


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"a metric is one number, not {value!r:.80}", key=name) from error
