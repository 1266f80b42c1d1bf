"""Programs that go on bit for bit, and such as forget something."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt_tasks import ResumableLoader


class Whole:
    """Everything is in the state."""

    def __init__(self, *, lr: float = 0.01):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def factor(self) -> float:
        return 1.0

    def train_step(self) -> dict[str, float]:
        loss = self.model(torch.randn(8, 4)).square().mean() * self.factor()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def evaluate(self, suite: str) -> dict[str, float]:
        raise NotImplementedError(suite)


class OwnGenerator(Whole):
    """A generator that is seeded, and not in the state."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = np.random.default_rng(3)

    def factor(self) -> float:
        return 1 + float(self.noise.random())


class Counting(Whole):
    """A counter that is not in the state."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def factor(self) -> float:
        self.seen += 1
        return 1 / self.seen


class NoOptimizer(Whole):
    """An optimizer that is not in the state."""

    def __init__(self) -> None:
        super().__init__()
        del self.state["optimizer"]


class Unseeded(Whole):
    """Another factor in every process."""

    def factor(self) -> float:
        return 1 + os.urandom(1)[0] / (1 + os.getpid())


class Drawing(Whole):
    """Draws from the global stream when a process begins to train."""

    begun = False

    def factor(self) -> float:
        if not self.begun:
            self.begun = True
            torch.rand(3)
        return 1.0


class BegunAnew(Whole):
    """Begins its loader in every step; a loss, which has no state, is beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.MSELoss()
        self.data = ResumableLoader(torch.utils.data.TensorDataset(torch.ones(32, 1)), batch_size=4)
        self.state["data"] = self.data

    def factor(self) -> float:
        (ones,) = next(iter(self.data))
        return float(self.loss(ones, torch.zeros(4, 1)))


class FailingLater(Whole):
    """Fails in a process that has restored."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = torch.zeros(1)
        self.state["trained"] = self.trained
        self.begun = 0

    def factor(self) -> float:
        self.trained += 1
        self.begun += 1
        if self.trained > self.begun:
            raise ValueError("the stream is exhausted")
        return 1.0
