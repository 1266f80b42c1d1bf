"""Early stop: a pure function from evaluations to the number of evaluations since the best one.

Evaluations are ordered by step, not by arrival: the newest checkpoint is often evaluated first. Keras' EarlyStopping
has the same rule (patience, min_delta, mode).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ckpt_tasks.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Stops a run once `patience` evaluations in a row have not made `metric` better than its best.

    Better means smaller if `mode` is "min", larger if it is "max", by more than `min_delta`; NaN is never better. Only
    evaluations by `suite` count. Raises ConfigError, which is a ValueError.
    """

    # Prefect validates a flow's parameter with pydantic, which reads this: it refuses a misspelled option, too.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    metric: str
    patience: int
    mode: str = "min"
    min_delta: float = 0.0
    suite: str = "quick"

    def __post_init__(self) -> None:
        for name in ("metric", "suite"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"{name} must be a name, not {getattr(self, name)!r}")
        if type(self.patience) is not int or self.patience < 1:
            raise ConfigError(f"patience must be a whole number of evaluations from 1 on, not {self.patience!r}")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"mode must be 'min' or 'max', not {self.mode!r}")
        if type(self.min_delta) not in (int, float) or not 0 <= self.min_delta < float("inf"):
            raise ConfigError(f"min_delta must be a number from 0 on, not {self.min_delta!r}")


@dataclass(frozen=True)
class Standing:
    """The best value of a run's metric, its step (None: no evaluation yet), and the count of evaluations since then."""

    best: float | None
    best_step: int | None
    since: int


def standing(values: Mapping[int, float], rule: EarlyStop, *, let_go_on_at: int = -1) -> Standing:
    """Return a run's standing by the `rule`, from the values of its metric by step.

    Evaluations up to step `let_go_on_at`, where a person resumed the run, are not counted in "since". All evaluations
    count for the best value.
    """
    sign = 1.0 if rule.mode == "min" else -1.0
    best, best_step, since = math.nan, None, 0
    for step, value in sorted(values.items()):
        if not math.isnan(value) and (best_step is None or sign * value < sign * best - rule.min_delta):
            best, best_step, since = value, step, 0
        elif step > let_go_on_at:
            since += 1
    return Standing(None if best_step is None else best, best_step, since)


def kept(values: Mapping[int, float], rule: EarlyStop) -> dict[int, float]:
    """Return the values from the best one on: they suffice to compute `standing`, even with later values."""
    best_step = standing(values, rule).best_step
    return {step: value for step, value in values.items() if best_step is None or step >= best_step}
