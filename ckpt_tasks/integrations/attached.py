"""What adapters share: a run named by a path or a configuration, and metrics that are numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.ledger.config import CheckpointConfig

__all__ = ["config_of", "numbers", "with_extra"]


def config_of(checkpoint: str | os.PathLike[str] | CheckpointConfig) -> CheckpointConfig:
    """Return the configuration of a run; a directory or URL alone gets the default one."""
    return checkpoint if isinstance(checkpoint, CheckpointConfig) else CheckpointConfig(checkpoint_dir=checkpoint)


def numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a log; tensors stay on their devices."""
    return {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in metrics.items()
        if (isinstance(value, torch.Tensor) and value.numel() == 1) or type(value) in (int, float)
    }


def with_extra(state: dict[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the state with the user's own objects; raises ConfigError if a name is taken."""
    taken = sorted(state.keys() & (extra or {}).keys())
    if taken:
        raise ConfigError(f"{', '.join(taken)} in `state` is saved already", hint="Give other names to your objects.")
    return {**state, **(extra or {})}
