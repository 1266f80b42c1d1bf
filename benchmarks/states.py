"""The state that the benchmarks save: a 12-layer transformer with AdamW, 625 MiB in fp32, or a tiny one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Trained", "build", "size_bytes"]


@dataclass
class Trained:
    """A model and its optimizer after one step, so that the optimizer has its moments."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def state(self) -> dict[str, object]:
        """What to save."""
        return {"model": self.model, "optimizer": self.optimizer}


def build(*, tiny: bool, seed: int = 0, device: str = "cpu") -> Trained:
    """Build the state: 146 parameters, so 438 tensors with AdamW's two moments, and a step count for each."""
    torch.manual_seed(seed)
    width, layers = (32, 2) if tiny else (616, 12)
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
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Trained(model, optimizer)


def size_bytes(trained: Trained) -> int:
    """The bytes of every tensor in the state."""
    tensors = list(trained.model.state_dict().values())
    for values in trained.optimizer.state.values():
        tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
