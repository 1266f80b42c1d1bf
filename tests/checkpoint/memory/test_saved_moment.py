"""A checkpoint is the state of its call: whatever writes to it once `step()` has returned, by whichever way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.state.tensors.tensors import same_bits


class Training:
    """A small model with many layouts and sizes, AdamW, and a copy of what they were at every step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.ModuleDict(
            {
                "layers": nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 64)),
                "conv": nn.Conv2d(32, 64, 3),
                "large": nn.Embedding(3, 1 << 20),  # copied in pieces by several threads
            }
        )
        kernel = self.model.get_parameter("conv.weight")
        kernel.data = kernel.data.to(memory_format=torch.channels_last)
        self.model.register_parameter("across", nn.Parameter(torch.randn(300, 500).t()))
        self.model.register_buffer("part", torch.randn(400, 400)[::2, 1::3])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.moments: dict[int, dict[str, torch.Tensor]] = {}

    def train_step(self, step: int) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, float(step))
        self.optimizer.step()
        self.moments[step] = self.now()

    def now(self) -> dict[str, torch.Tensor]:
        values = {name: value.clone() for name, value in self.model.state_dict().items()}
        for number, kept in self.optimizer.state_dict()["state"].items():
            values |= {f"{number}.{name}": value.clone() for name, value in kept.items()}
        return values

    def tensors(self) -> list[torch.Tensor]:
        moments = [value for kept in self.optimizer.state.values() for value in kept.values()]
        return [*self.model.parameters(), *self.model.buffers(), *moments]


def _by_data(tensor: torch.Tensor) -> None:
    tensor.data.clamp_(0, 0)


def _by_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[...] = 7


def _by_operation(tensor: torch.Tensor) -> None:
    tensor.detach().zero_()


def _by_other_memory(tensor: torch.Tensor) -> None:
    tensor.data = torch.full_like(tensor, 3)


WRITES = (_by_data, _by_numpy, _by_operation, _by_other_memory)


def test_a_write_right_after_the_call_is_not_in_the_checkpoint(run_dir: Path) -> None:
    """P1: every layout and size, parameters, buffers and moments: what changes after `step()` is the next step's."""
    training = Training()
    config = CheckpointConfig(
        checkpoint_dir=str(run_dir), step_interval=1, max_num_checkpoints=None, keep_every_n_steps=1
    )
    with Checkpointer(config) as ckpt:
        for step, write in enumerate(WRITES[2:] + WRITES, 1):  # two steps make the memory, the others refill it
            training.train_step(step)
            assert ckpt.step(step, training.state)
            for tensor in training.tensors():
                write(tensor)
    run, fresh = open_run(str(run_dir)), Training()
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [6, 5, 4, 3, 2, 1]
    for checkpoint in run.checkpoints():
        run.restore(checkpoint, fresh.state)
        values, moment = fresh.now(), training.moments[checkpoint.step]
        mixed = [name for name, value in values.items() if not same_bits(value, moment[name])]
        assert (values.keys(), mixed) == (moment.keys(), []), checkpoint.step
