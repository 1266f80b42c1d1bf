"""What the values of a state are, and which names they may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.format.keys import is_group
from ckpt_tasks.state.rng import GENERATORS, RNG
from ckpt_tasks.state.values import has_state

__all__ = ["checked_state", "kind_of", "modules_of"]


def checked_state(state: Mapping[str, Any]) -> None:
    """Raise UnsupportedStateError where a state is no mapping of group names to values."""
    if not isinstance(state, Mapping):
        raise UnsupportedStateError(f"a state is a dict of named objects, not a {type(state).__qualname__}")
    for name in state:
        if not isinstance(name, str) or not is_group(name) or name == RNG:
            hint = "A letter, then letters, digits or underscores, 64 at most; rng is taken."
            raise UnsupportedStateError("this cannot be the name of a part of the state", key=repr(name), hint=hint)


def kind_of(value: Any) -> str:
    """Say how a value is captured: as a module, optimizer, generator, stateful object or plain value."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, GENERATORS):
        return "generator"
    return "stateful" if has_state(value) else "plain"


def modules_of(state: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the modules of a state by group."""
    return {name: value for name, value in state.items() if isinstance(value, nn.Module)}
