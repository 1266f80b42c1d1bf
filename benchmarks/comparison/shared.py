"""What every job of the comparison trains, and what it prints of it. It needs torch alone: peers bring no ckpt-tasks.

A job trains into the directory $DIRECTORY and goes on from what it finds there by its tool's own means. It prints
`from N` when it begins, `step N SECONDS` after every step, and `end DIGEST`.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

DIRECTORY = os.environ["DIRECTORY"]
STEPS, EVERY, BATCH, SAMPLES = 40, 5, 4, 64  # 16 steps are an epoch: saves fall into the middle of it
BALLAST_MIB = int(os.environ.get("BALLAST_MIB", "16"))
SEED = int(os.environ.get("SEED", "0"))
STEP_S = float(os.environ.get("STEP_S", "0.05"))  # what a step takes at least, so that there is time to kill within it
PAUSE_AT = int(os.environ.get("PAUSE_AT", "0"))  # behind this step training waits for a file beside the directory


class Net(nn.Module):
    """A small network with dropout, and ballast that changes in every step so that a save has something to write."""

    ballast: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 1))
        self.register_buffer("ballast", torch.rand(BALLAST_MIB << 18))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.ballast += 1
            time.sleep(STEP_S)
        return {"loss": (self.layers(x) - y).square().mean() * (1 + random.random())}


class Steps:
    """Prints what a job has to say."""

    def __init__(self, begun: int):
        self.done = begun
        _say(f"from {begun}")
        self._at = time.perf_counter()

    def step(self) -> None:
        """Say that a step has ended, with whatever save belongs to it."""
        now = time.perf_counter()
        self.done += 1
        _say(f"step {self.done} {now - self._at:.6f}")
        while self.done == PAUSE_AT and not os.path.exists(f"{DIRECTORY}.go"):
            time.sleep(0.1)
        self._at = time.perf_counter()

    def end(self, net: nn.Module) -> None:
        """Say which bits training has ended with."""
        found = hashlib.sha256()
        for value in net.state_dict().values():
            found.update(value.contiguous().numpy().tobytes())
        _say(f"end {found.hexdigest()[:16]}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def prepare() -> tuple[Net, TensorDataset]:
    """Seed all streams, and make the network and its data."""
    torch.set_num_threads(1)
    random.seed(SEED)
    torch.manual_seed(SEED)
    net = Net()
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return net, TensorDataset(x, x.sum(1, keepdim=True))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer."""
    return torch.optim.AdamW(net.parameters(), 0.01)


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Train one batch in a loop of one's own."""
    optimizer.zero_grad()
    net(*batch)["loss"].backward()
    optimizer.step()


def shuffled(data: TensorDataset) -> DataLoader[Any]:
    """Return what most scripts have: a plain loader that shuffles."""
    return DataLoader(data, BATCH, shuffle=True)
