"""A rank's session: its program trains one model together with those of the other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.session.local import LocalSession
from ckpt_tasks.state.groups import ByRank, objects_of


class RankSession(LocalSession):
    """The session of one rank of several, in its process."""

    def evaluate(self, checkpoint: Checkpoint, suite: str) -> Mapping[str, float]:
        """Measure a checkpoint in all ranks; a signal ends this at once, since nothing is left to commit."""
        self.hold_signals(False)
        return super().evaluate(checkpoint, suite)


def check_parallel(program: Any, ranks: int) -> None:
    """Raise ConfigError if a program has no DistributedDataParallel, FSDP or DTensor in its state or attributes.

    A `ByRank` is enough, too: it shows that the program knows its ranks.
    """
    held = (*objects_of(program.state), *objects_of(getattr(program, "__dict__", {})))
    if not any(map(_is_parallel, held)):
        raise ConfigError(
            f"the program holds no DistributedDataParallel, FSDP or DTensor: {ranks} ranks would train the same",
            hint="Wrap its model (DistributedDataParallel, fully_shard), or train with one rank.",
        )


def _is_parallel(value: Any) -> bool:
    if not isinstance(value, torch.nn.Module):
        return isinstance(value, (ByRank, DTensor))
    from torch.distributed.fsdp import FullyShardedDataParallel  # Its import takes long, and one rank does not need it.

    if any(isinstance(parameter, DTensor) for parameter in value.parameters()):
        return True
    return any(isinstance(each, (DistributedDataParallel, FullyShardedDataParallel)) for each in value.modules())
