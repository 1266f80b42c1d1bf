"""A small program whose data is divided again for every number of ranks, and what it has trained."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckpt_tasks import ResumableSampler, open_run

ELASTIC = "tests.support.elastic:Elastic"
_SAMPLES, _BATCH = 480, 24


class Elastic:
    """Fit rows that are numbers of samples, sharded; all ranks together have 24 of them in a step.

    After `stops_at` steps the last rank stops itself (SIGSTOP), once in all: a file in `folder` says so.
    """

    recorded_params = ("stops_at", "folder", "step_s")
    unit = "rows"

    def __init__(self, *, seed: int = 0, stops_at: int | None = None, folder: str = "", step_s: float = 0.0):
        torch.manual_seed(seed)
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
        if dist.is_initialized():
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self._sampler = ResumableSampler(_SAMPLES, _BATCH // size, rank=rank, world_size=size)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": self._sampler,
            "steps": 0,
        }
        self._stopped = Path(folder, "stopped") if rank == size - 1 else None
        self._stops_at, self._step_s = stops_at, step_s

    def train_step(self) -> dict[str, float]:
        time.sleep(self._step_s)
        rows = torch.tensor(next(iter(self._sampler)))[:, None] * torch.ones(4) / _SAMPLES
        self._sampler.advance()
        loss = (self.model(rows) - rows.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.state["steps"] += 1
        if self.state["steps"] == self._stops_at and self._stopped and not self._stopped.exists():
            self._stopped.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss.item(), "rows": float(len(rows))}

    def evaluate(self, suite: str) -> dict[str, float]:
        return {"weight": next(self.model.parameters()).sum().item(), "suite": float(len(suite))}


def trained(run_dir: Path) -> tuple[int, dict[str, Any], list[str]]:
    """Return the newest step, its state as one process restores it, and the metrics of every step, all as texts."""
    run = open_run(str(run_dir))
    newest, fresh = run.find("latest"), Elastic(seed=99)
    run.restore(newest, fresh.state, partial=False)
    state: dict[str, Any] = {name: value.numpy().tobytes().hex() for name, value in fresh.model.state_dict().items()}
    state["moments"] = [str(entry) for entry in fresh.optimizer.state_dict()["state"].values()]
    state |= {"steps": fresh.state["steps"], "data": fresh.state["data"].state_dict()}
    return newest.step, state, [f"{step.step} {step.metrics}" for step in run.curve().steps]
