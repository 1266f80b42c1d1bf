"""Runs to fork: a small program with an optimizer and a schedule, trained in a session as a flow does it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.checkpoint.transfer.fork import plan_fork, run_fork
from ckpt_tasks.checkpoint.transfer.transfer import Moved
from ckpt_tasks.flows.session.local_session import LocalSession
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.port import Store

PROGRAM = "tests.support.forks:Scheduled"


class Scheduled:
    """Fit noise with a net that has dropout, a frozen part that is stored once, and a schedule of your choice.

    The batches come from the process's random streams. `lr` rises over `warmup` steps.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        width: int = 8,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        warmup: int = 4,
        schedule: str = "warmup",
        frozen: int = 0,
    ):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Tanh(), nn.Linear(width, 1))
        if frozen:
            self.model.register_parameter("base", nn.Parameter(torch.ones(frozen), requires_grad=False))
        decayed = [p for p in self.model.parameters() if p.requires_grad and p.dim() == 2]
        others = [p for p in self.model.parameters() if p.requires_grad and p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}], lr=lr
        )
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if schedule == "warmup":
            self.state["schedule"] = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: min(1.0, step / warmup)
            )
        elif schedule == "step":
            self.state["schedule"] = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=warmup, gamma=0.5)

    def train_step(self) -> dict[str, float]:
        x = torch.randn(16, 4) + random.random() + float(np.random.rand())  # noqa: NPY002 (the process's own stream)
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if "schedule" in self.state:
            self.state["schedule"].step()
        return {"loss": loss.item()}

    def evaluate(self, suite: str) -> dict[str, float]:
        raise NotImplementedError(suite)


def config(run_dir: Path | str | Location, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_dir=run_dir, **{"max_num_checkpoints": None, "memory_dir": None, **options})


def two_steps(run_dir: Path) -> Path:
    """Make a run with steps 3 and 6, each of its own owner: trained once, and copied for each test."""
    return Path(shutil.copytree(f"{_two_steps().name}/run", run_dir))


@cache
def _two_steps() -> tempfile.TemporaryDirectory[str]:
    place = tempfile.TemporaryDirectory(prefix="ckpt-tasks-forks-")
    for step in (3, 6):
        train(f"{place.name}/run", step, {"lr": 0.02})  # named as a test's run: its key is the directory's name
    return place


def train(run_dir: Path | str | Location, until: int, params: Mapping[str, Any] | None = None, **options: Any) -> str:
    """Go on with a run, or begin one, with these parameters; return a digest of every bit of its state then."""
    with Checkpointer(config(run_dir, **options)) as ckpt:
        session = LocalSession(ckpt, PROGRAM, params)
        session.restore()
        session.run(until)
        session.save(until)
        return digest(session.state)


def digest(state: Mapping[str, Any]) -> str:
    """Digest weights, moments, options with the schedule, and streams, each for itself: what differs shows."""
    found = state["optimizer"].state_dict()
    schedule = state["schedule"].state_dict() if "schedule" in state else {}
    moments = [held[name] for held in found["state"].values() for name in ("exp_avg", "exp_avg_sq")]
    parts = {
        "weights": b"".join(tensor.numpy().tobytes() for tensor in state["model"].state_dict().values()),
        "moments": b"".join(tensor.numpy().tobytes() for tensor in moments),
        "options": repr((found["param_groups"], sorted(schedule.items(), key=lambda item: item[0]))).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "Python": repr(random.getstate()).encode(),
    }
    return " ".join(f"{name} {hashlib.sha256(part).hexdigest()}" for name, part in parts.items())


def fork(
    source: Path | str, step: int, target: Path | Store, changed: Mapping[str, Any] | None = None, **options: Any
) -> Moved:
    run = open_run(str(source))
    store = LocalStore(target) if isinstance(target, Path) else target
    return run_fork(run, store, plan_fork(run, run.find(step), store, changed or {}, options.pop("run_key", None)))


def run_of(run_dir: Path | str) -> Run:
    return open_run(str(run_dir))


def objects(run_dir: Path) -> dict[str, int]:
    """Return the inode of every object of a checkpoint but its manifest."""
    return {
        str(path.relative_to(run_dir)): path.stat().st_ino
        for path in run_dir.glob("checkpoint_*/*/*")
        if path.name != "manifest.json"
    }


def states(run_dir: Path) -> list[dict[str, Any]]:
    """Return the state of every ledger entry, oldest first, read past the package."""
    entries = sorted(run_dir.glob("ledger/*.json"), reverse=True)
    return [json.loads(entry.read_bytes())["state"] for entry in entries]


class NoLinks:
    """The system's calls on two file systems: a file of one can have no name on the other."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def link(self, old: Any, new: Any) -> None:
        if ".tmp-" not in str(old):  # a name within one directory
            raise OSError(18, "Invalid cross-device link")
        os.link(old, new)
