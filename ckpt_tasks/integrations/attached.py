"""Shared functions of the adapters: the numbers in a log, the user's objects, and values that differ by rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from ckpt_tasks.errors import ConfigError


def numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among logged values; tensors stay on their devices."""
    return {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in metrics.items()
        if (isinstance(value, torch.Tensor) and value.numel() == 1) or type(value) in (int, float)
    }


def with_extra(state: dict[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a state with the user's own objects added; raises ConfigError if a name is taken."""
    taken = sorted(state.keys() & (extra or {}).keys())
    if taken:
        raise ConfigError(f"{', '.join(taken)} in `state` is saved already", hint="Give other names to your objects.")
    return {**state, **(extra or {})}


def gather_of_ranks(own: dict[str, Any]) -> list[Any]:
    """Return the values of all ranks, by rank; every rank gets the same list, since all ranks save the same state."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [own]
    of_ranks = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, own)
    return of_ranks
