"""States as users of DCP have them, and what tests want to know of them."""

from __future__ import annotations

from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer after two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, **values: Any) -> dict[str, Any]:
    """Return a DCP state of both, in the form of torch's get_state_dict, with more values."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, **values}


def values() -> dict[str, Any]:
    """Return what DCP pickles, of every type that can be stored."""
    return {
        "epoch": 3,
        "loss": float("inf"),
        "name": "höhe",
        "tuple": (torch.arange(3), "x", (1, 2.5)),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "when": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "nested": {"list": [1, 2, [3]], "mixed": [torch.ones(2), {"deep": {4}}], "ordered": OrderedDict(a=1)},
        "bytes": b"\x80\x04.",
    }


def same(one: Any, other: Any) -> bool:
    """Say whether two values are equal, bit for bit and type for type; DCP makes plain dicts of all mappings."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def emptied(value: Any) -> Any:
    """Return a state of the same form with zeros for its tensors and None for its values."""
    if isinstance(value, dict):
        return {name: emptied(item) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return [emptied(item) for item in value] if isinstance(value, list) and _has_tensor(value) else None


def _has_tensor(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_tensor, value))
    return isinstance(value, dict | torch.Tensor)
