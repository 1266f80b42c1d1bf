"""The state that the benchmarks save: a 12-layer transformer with AdamW, 625 MiB in fp32, or a tiny one.

BENCH_WIDTH=2208 makes it 7.9 GiB, for a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Trained", "build", "flat", "size_bytes", "states"]


@dataclass
class Trained:
    """A model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def state(self) -> dict[str, object]:
        """What to save."""
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        """Take one optimizer step, on random gradients."""
        for parameter in (one for group in self.optimizer.param_groups for one in group["params"]):
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def build(*, tiny: bool, seed: int = 0, device: str = "cpu", stepped: bool = True) -> Trained:
    """Build the state: 146 parameters, and with AdamW's two moments after one step 438 tensors and 146 step counts."""
    torch.manual_seed(seed)
    width, layers = (32, 2) if tiny else (int(os.environ.get("BENCH_WIDTH", "616")), 12)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(256, width),
            "layers": nn.ModuleList(
                nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True) for _ in range(layers)
            ),
            "head": nn.Linear(width, 256, bias=False),
        }
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trained = Trained(model, optimizer)
    if stepped:
        trained.step()
    return trained


def states(trained: Trained) -> dict[str, Any]:
    """Return the state_dicts, as torch's own tools save them."""
    return {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}


def flat(trained: Trained) -> dict[str, torch.Tensor]:
    """Return every tensor by a name of its own, as safetensors saves them."""
    named = {f"model.{name}": tensor for name, tensor in trained.model.state_dict().items()}
    for index, values in trained.optimizer.state_dict()["state"].items():
        named |= {f"optimizer.{index}.{name}": tensor for name, tensor in values.items()}
    return named


def size_bytes(trained: Trained) -> int:
    """The bytes of every tensor in the state."""
    tensors = list(trained.model.state_dict().values())
    for values in trained.optimizer.state.values():
        tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
