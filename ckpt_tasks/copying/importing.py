"""Import: a plan that says which step and groups a file of others becomes; `checkpoint/importing.py` commits it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt_tasks.copying.sources import Source, SourceTensor, open_source
from ckpt_tasks.copying.taking import Taken, take
from ckpt_tasks.errors import ConfigError, IntegrityError
from ckpt_tasks.format.image import TensorSpec
from ckpt_tasks.format.keys import MAX_STEP
from ckpt_tasks.state.tensors import DTYPES

__all__ = ["ImportPlan", "plan_import", "spec_of"]


@dataclass(frozen=True, kw_only=True)
class ImportPlan:
    """What an import will write: `groups` as a manifest has them, and their tensors by full key.

    `taken` lists the groups, and `left` says of everything else why it is not taken, by its name in the file.
    """

    source: Source = field(repr=False)
    step: int
    groups: Mapping[str, Mapping[str, Any]] = field(repr=False)
    tensors: Mapping[str, torch.Tensor | SourceTensor] = field(repr=False)
    taken: tuple[Taken, ...]
    left: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        """The size of all tensors."""
        return sum(spec_of(key, tensor).size_bytes for key, tensor in self.tensors.items())


def plan_import(path: str | os.PathLike[str], *, step: int | None = None, groups: Sequence[str] = ()) -> ImportPlan:
    """Open a file or a directory and decide what of it becomes which group; nothing is written.

    `groups` are GROUP or GROUP=NAME, where NAME is one in the file; without one everything is taken that can be.
    Without a `step` it is the one that the file has (`step` or `global_step`), or 0. Raises what `open_source` raises,
    and ConfigError for a step or groups that cannot be.
    """
    source = open_source(path)
    taking = take(source, groups)
    found = _step_of(source) if step is None else step
    if not 0 <= found <= MAX_STEP:
        raise ConfigError(f"{found} is not a step", hint="Give one with --step N.")
    plan = ImportPlan(
        source=source,
        step=found,
        groups=taking.groups,
        tensors=taking.tensors,
        taken=tuple(taking.taken),
        left=taking.left,
    )
    claimed = sum(one.size_bytes for one in plan.taken)
    if claimed > source.size_bytes:  # a tensor that repeats one element takes any room that it likes
        raise IntegrityError(
            f"its tensors claim {claimed} bytes, and the file has {source.size_bytes}",
            key=source.name,
            hint="Save expanded tensors with .contiguous().",
        )
    return plan


def spec_of(key: str, tensor: torch.Tensor | SourceTensor) -> TensorSpec:
    """Say what is stored for a tensor of a group: the name without the group, dtype and shape."""
    dtype = tensor.dtype if isinstance(tensor, SourceTensor) else DTYPES[tensor.dtype]
    return TensorSpec(key.partition("/")[2], dtype, tuple(tensor.shape))


def _step_of(source: Source) -> int:
    for name in ("global_step", "step"):
        value = (source.about or source.values).get(name)
        if type(value) is int:
            return value
    return 0
