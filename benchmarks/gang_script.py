"""A model on two ranks that one kill hits: a program of ours, a script of torchrun with `dcp.save`, and of Ray Train.

All save every `SAVE_EVERY` steps, and write a line for each step: when it ended, by the host's clock, and its number.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load  # resume
from torch.distributed.checkpoint.state_dict_saver import save  # resume
from torch.distributed.fsdp import fully_shard

__all__ = ["KILL_AT", "SAVE_EVERY", "STEPS", "Victim"]

STEPS, SAVE_EVERY, KILL_AT = 60, 20, 37


class Victim:
    """Train a net, sharded; rank 1 does `what` ("kill" or "stop") to itself in step `KILL_AT`, once."""

    recorded_params = ("folder", "what")

    def __init__(self, *, folder: str, what: str = "", step_s: float = 0.02):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "steps": 0}
        self._folder, self._what, self._step_s = Path(folder), what, step_s

    def train_step(self) -> dict[str, float]:
        """Make a step."""
        time.sleep(self._step_s)
        self.state["steps"] += 1
        if self._what and self.state["steps"] == KILL_AT and dist.get_rank() == 1:
            self._die()
        loss = self.model(torch.ones(8, 256)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if dist.get_rank() == 0:
            with (self._folder / "steps").open("a") as log:
                log.write(f"{time.monotonic()} {self.state['steps']}\n")
        return {"loss": loss.item()}

    def evaluate(self, suite: str) -> dict[str, float]:
        """Measure nothing."""
        return {}

    def _die(self) -> None:
        killed = self._folder / "killed"
        if not killed.exists():
            killed.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL if self._what == "kill" else signal.SIGSTOP)


def main(folder: str) -> None:
    """Train under torchrun; what a user writes to go on after a kill is marked."""
    dist.init_process_group("gloo")
    program = Victim(folder=folder, what="kill")
    root = Path(folder, "dcp")  # resume
    saved = sorted(root.glob("step-*"), key=lambda place: int(place.name[5:]))  # resume
    if saved:  # resume
        model, optimizer = get_state_dict(program.model, program.optimizer)  # resume
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "steps": 0}  # resume
        load(state, checkpoint_id=str(saved[-1]))  # resume
        set_state_dict(  # resume
            program.model, program.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )  # resume
        program.state["steps"] = state["steps"]  # resume
    while program.state["steps"] < STEPS:
        program.train_step()
        step = program.state["steps"]
        if step % SAVE_EVERY == 0:
            model, optimizer = get_state_dict(program.model, program.optimizer)  # resume
            state = {"model": model, "optimizer": optimizer, "steps": step}  # resume
            save(state, checkpoint_id=str(root / "half"))  # resume
            if dist.get_rank() == 0:  # resume
                shutil.move(root / "half", root / f"step-{step}")  # resume
            dist.barrier()  # resume


def under_ray(folder: str) -> None:
    """Train under Ray Train, which starts the workers again; what a user writes to go on is marked for it, too."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        of_a_worker,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=f"{folder}/ray", name="run", failure_config=FailureConfig(max_failures=3)),
        torch_config=TorchConfig(backend="gloo"),
    )
    trainer.fit()


def of_a_worker(config: dict[str, Any]) -> None:
    """Train in one of Ray Train's workers."""
    from ray import train

    folder = config["folder"]
    program = Victim(folder=folder, what="kill")
    if before := train.get_checkpoint():  # resume in Ray
        with before.as_directory() as place:  # resume in Ray
            model, optimizer = get_state_dict(program.model, program.optimizer)  # resume in Ray
            state: dict[str, Any] = {"model": model, "optimizer": optimizer, "steps": 0}  # resume in Ray
            load(state, checkpoint_id=place)  # resume in Ray
            set_state_dict(  # resume in Ray
                program.model, program.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )  # resume in Ray
            program.state["steps"] = state["steps"]  # resume in Ray
    while program.state["steps"] < STEPS:
        metrics = program.train_step()
        if program.state["steps"] % SAVE_EVERY == 0:
            model, optimizer = get_state_dict(program.model, program.optimizer)  # resume in Ray
            place = tempfile.mkdtemp()  # resume in Ray
            state = {"model": model, "optimizer": optimizer, "steps": program.state["steps"]}  # resume in Ray
            save(state, checkpoint_id=place)  # resume in Ray
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(place))  # resume in Ray
            shutil.rmtree(place)  # resume in Ray


if __name__ == "__main__":
    (under_ray if sys.argv[2:] else main)(sys.argv[1])
