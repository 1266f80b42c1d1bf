"""The program to train. The comments "Your data" and "Your model" say what to replace."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ckpt_tasks import ResumableSampler


class Training:
    """Learns to tell two spirals apart. Arguments are set by `ckpt train … --param width=128`."""

    unit = "samples"  # Under this name train_step() returns how many samples it used.

    def __init__(self, *, seed: int = 0, width: int = 64, lr: float = 3e-3, batch_size: int = 32):
        torch.manual_seed(seed)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

        # Your data: any data set with a length.
        points, arms = spirals(2_000)
        training = TensorDataset(points[400:], arms[400:])
        self.held_out = points[:400].to(self.device), arms[:400].to(self.device)

        # Your model, and all that trains it.
        self.model = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Dropout(0.05), nn.Tanh(), nn.Linear(width, 2)
        ).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

        # The state is what a checkpoint holds: everything that changes during training, and the position in the data.
        sampler = ResumableSampler(len(training), batch_size, seed=seed)
        self.batches = sampler.follow(DataLoader(training, batch_sampler=sampler))
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "data": sampler}

    def train_step(self) -> dict[str, float]:
        """Make one step with the next batch, and return its metrics."""
        points, arms = (part.to(self.device) for part in next(self.batches))
        loss = functional.cross_entropy(self.model(points), arms)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item(), "samples": float(len(points))}

    def evaluate(self, suite: str) -> dict[str, float]:
        """Measure the model on held-out points; `suite` is a name of your choice, by default `quick`."""
        points, arms = self.held_out
        self.model.eval()
        with torch.no_grad():
            scores = self.model(points)
        self.model.train()
        right = (scores.argmax(1) == arms).float().mean()
        return {"heldout_loss": functional.cross_entropy(scores, arms).item(), "heldout_accuracy": right.item()}


def spirals(count: int) -> tuple[Tensor, Tensor]:
    """Return points of two noisy spirals, float32 of shape (count, 2), and the spiral of each point."""
    drawn = torch.Generator().manual_seed(1)
    arms = torch.arange(count) % 2
    turn = torch.rand(count, generator=drawn).sqrt() * 3 * math.pi
    angle = turn + arms * math.pi
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 10
    return points + 0.02 * torch.randn(count, 2, generator=drawn), arms
