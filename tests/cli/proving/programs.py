"""Programs that go on bit for bit, and such as forget something."""

from __future__ import annotations

import os
import time
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


class LateSchedule(Whole):
    """A schedule that is not in the state, and whose milestone comes after the steps that are tried."""

    def __init__(self) -> None:
        super().__init__()
        self.schedules = [torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [500])]

    def train_step(self) -> dict[str, float]:
        try:
            return super().train_step()
        finally:
            self.schedules[0].step()


class Averaging(Whole):
    """Averaged weights that are not in the state; only the evaluation reads them, if there is one."""

    def __init__(self, *, suites: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.suites = suites
        self.averaged = {name: value.clone() for name, value in self.model.state_dict().items()}

    def factor(self) -> float:
        for name, value in self.model.state_dict().items():
            self.averaged[name].lerp_(value, 0.1)
        return 1.0

    def evaluate(self, suite: str) -> dict[str, float]:
        if suite not in self.suites:
            return super().evaluate(suite)
        return {"norm": sum(value.norm().item() for value in self.averaged.values()), "seconds": time.time()}


class OfASet(Whole):
    """The order of a set of texts is another one in each process."""

    def factor(self) -> float:
        return 1 + float([*{f"shard{n}" for n in range(9)}].index("shard0"))


class View:
    """Another object for an optimizer that is in the state, such as accelerate holds."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict


class Unchanged(Whole):
    """What is outside of the state is the same after a resume, or differs in every process; it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 1)
        self.began = time.time()
        self.chance = torch.Generator()
        self.points = torch.randn(8, 4, generator=self.chance)
        self.held_out = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(self.points), batch_size=4)
        self.last = 0.0
        # After a restore the options of these groups have another order.
        self.optimizer = torch.optim.AdamW([{"params": self.model.parameters(), "weight_decay": 0.1}])
        self.state["optimizer"], self.view = self.optimizer, View(self.optimizer)

    def factor(self) -> float:
        self.last = float(self.teacher(self.points).sum())
        return self.last

    def evaluate(self, suite: str) -> dict[str, float]:
        return {"loss": sum(self.model(x).square().mean().item() for (x,) in self.held_out)}


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
