"""The kinds of groups of a state."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ckpt_tasks.objects.modules import takes_part
from ckpt_tasks.objects.names import unwrapped
from ckpt_tasks.objects.optimizers import is_ordinary
from ckpt_tasks.tensors.streams import GENERATORS
from ckpt_tasks.tensors.values import has_state

__all__ = ["kind_of", "may_draw"]


def may_draw(value: Any) -> bool:
    """Say whether the state of a value comes from code that is neither torch's nor ours, and so may draw numbers."""
    kind = kind_of(value)
    if kind == "module":
        return any(takes_part(module) for module in unwrapped(value).modules())
    if kind == "optimizer":
        return not is_ordinary(value)
    return kind == "stateful" and type(value).__module__.partition(".")[0] not in ("torch", "ckpt_tasks")


def kind_of(value: Any) -> str:
    """Say how a value is captured: as a module, optimizer, generator, stateful object or plain value."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, GENERATORS):
        return "generator"
    return "stateful" if has_state(value) else "plain"
