"""A program whose steps take a known time, so that what a flow adds can be seen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["Sleeper"]


class Sleeper:
    """Sleep through every step; the state is one small module."""

    def __init__(self, *, step_s: float = 0.1, width: int = 256):
        self._step_s = step_s
        self._model = nn.Linear(width, width)
        self.state: dict[str, Any] = {"model": self._model}

    def train_step(self) -> Mapping[str, float]:
        """Sleep, and change the state."""
        time.sleep(self._step_s)
        with torch.no_grad():
            self._model.weight += 1
        return {"loss": 0.0}

    def evaluate(self, suite: str) -> Mapping[str, float]:
        """Report nothing of interest."""
        return {"loss": 0.0}
