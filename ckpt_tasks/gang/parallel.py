"""Whether a program trains one model on all ranks: two equal trainings on one rank each are not a training on two."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckpt_tasks.state.groups import ByRank, objects_of

__all__ = ["is_parallel"]


def is_parallel(program: Any) -> bool:
    """Return True if a program holds a DistributedDataParallel, FSDP or a DTensor, in its state or beside it.

    A state with `ByRank` shows that the program knows its ranks.
    """
    held = (*objects_of(program.state), *objects_of(getattr(program, "__dict__", {})))
    return any(map(_is_parallel, held))


def _is_parallel(value: Any) -> bool:
    if not isinstance(value, torch.nn.Module):
        return isinstance(value, (ByRank, DTensor))
    if any(isinstance(parameter, DTensor) for parameter in value.parameters()):
        return True
    return any(isinstance(each, (DistributedDataParallel, FullyShardedDataParallel)) for each in value.modules())
