"""The curve of a run: the metrics of every step. `steps.py` reads it; drawing it needs no Arrow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CurveStep:
    """One step of a run's curve, committed by ledger entry `n`; `abandoned`: training went back to an earlier step."""

    n: int
    step: int
    at_s: float
    metrics: Mapping[str, float]
    abandoned: bool


@dataclass(frozen=True)
class Curve:
    """The steps of a run in the order of their commits; `damaged` tables could not be read."""

    steps: tuple[CurveStep, ...] = ()
    damaged: int = 0
