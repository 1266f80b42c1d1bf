"""Modules that change their own shapes: quantization-aware training, uninitialised parameters, added param groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import StateMismatchError
from tests.support.roundtrip import restore, same_module, save


class Growing(nn.Module):
    """A module that takes any length of history; `takes` False: one that leaves its own as it is, without a word."""

    def __init__(self, length: int, *, takes: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("history", torch.arange(float(length)))
        self._takes = takes

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self._takes:
            self.history = state_dict[f"{prefix}history"].clone()
        else:
            state_dict[f"{prefix}history"] = self.history
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_module_that_resizes_itself_is_asked() -> None:
    """P8, P50: its own code decides about its own tensors; the layer inside of it is compared as ever."""
    module, fresh = Growing(5), Growing(3)
    restore(save({"model": module}), {"model": fresh})
    same_module(module, fresh)
    module.layer = nn.Linear(2, 3)
    with pytest.raises(StateMismatchError, match=r"model/layer\.weight"):
        restore(save({"model": module}), {"model": fresh})


def test_a_module_that_does_not_take_a_shape_is_an_error() -> None:
    """P50: a load_state_dict that leaves out what it cannot take is noticed, and all is put back."""
    fresh = Growing(3, takes=False)
    before = fresh.layer.weight.clone()
    with pytest.raises(StateMismatchError, match="did not take the stored shape") as caught:
        restore(save({"model": Growing(5)}), {"model": fresh})
    assert caught.value.different == ("model/history (float32[3] here, float32[5] in the checkpoint)",)
    assert torch.equal(fresh.layer.weight, before)


def test_an_added_param_group_gets_a_hint() -> None:
    """P11: a checkpoint of before add_param_group() says when the group is to be added."""
    model, head = nn.Linear(2, 2), nn.Linear(2, 2)
    one, other = torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())
    other.add_param_group({"params": [*head.parameters()]})
    with pytest.raises(StateMismatchError, match=r"add_param_group\(\) others after it"):
        restore(save({"model": model, "optimizer": one}), {"model": model, "optimizer": other})


def test_a_training_of_lazy_modules_resumes_exactly(tmp_path: Path) -> None:
    """Modules without shapes, and the optimizer of their parameters, resume with the values of an unbroken run."""

    def train(run: str, steps: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Dropout(0.5), nn.LazyLinear(1))
        optimizer = torch.optim.Adam(model.parameters())
        state = {"optimizer": optimizer, "model": model}
        losses = []
        with Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path / run, memory_dir=None)) as ckpt:
            for step in range(ckpt.restore(state) + 1, steps + 1):
                loss = model(torch.randn(16, 5)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ckpt.save(step, state)
                losses.append(loss.item())
        return losses

    assert train("broken", 3) + train("broken", 6) == train("whole", 6)
