"""Plan an import: choose groups and a step for a foreign file; `checkpoint/importing.py` commits the plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt_tasks.checkpoint.transfer.importing.sources import Source, SourceTensor, open_source
from ckpt_tasks.checkpoint.transfer.importing.taking import Taken, take
from ckpt_tasks.errors import CkptError, ConfigError, IntegrityError
from ckpt_tasks.format.keys import MAX_STEP
from ckpt_tasks.format.layout.image import TensorSpec
from ckpt_tasks.format.parsing import MALFORMED
from ckpt_tasks.gc_pause import gc_paused
from ckpt_tasks.state.tensors.tensors import DTYPES


@dataclass(frozen=True, kw_only=True)
class ImportPlan:
    """The groups that an import will write, in the form of a manifest, and their tensors by full key.

    `taken` describes the groups. `left` maps the names of all other contents of the file to the reasons why the import
    omits them. `environment` will be in the manifest.
    """

    source: Source = field(repr=False)
    step: int
    groups: Mapping[str, Mapping[str, Any]] = field(repr=False)
    tensors: Mapping[str, torch.Tensor | SourceTensor] = field(repr=False)
    taken: tuple[Taken, ...]
    left: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """The size of all tensors to import."""
        return sum(spec_of(key, tensor).size_bytes for key, tensor in self.tensors.items())


@gc_paused()
def plan_import(path: str | os.PathLike[str], *, step: int | None = None, groups: Sequence[str] = ()) -> ImportPlan:
    """Open a file or a directory and decide which part becomes which group; write nothing.

    `groups` are GROUP or GROUP=NAME, where NAME is a name in the file (default: all groups that can be imported).
    `step` defaults to `global_step` or `step` in the file (a whole number, or a tensor with one), else to 0. Raises
    what `open_source` raises, IntegrityError if tensors claim more bytes than the file has, and ConfigError for an
    invalid step or group.
    """
    source = open_source(path)
    try:
        taking = take(source, groups)
        number = _step_of(source) if step is None else step
    except CkptError:
        raise
    except (RuntimeError, *MALFORMED) as error:  # A value has the name of a state_dict, and is not one.
        raise IntegrityError(f"its values do not fit each other: {error!r:.200}", key=source.name) from error
    if not 0 <= number <= MAX_STEP:
        raise ConfigError(f"{number} is not a step", hint="Give one with --step N.")
    plan = ImportPlan(
        source=source,
        step=number,
        groups=taking.groups,
        tensors=taking.tensors,
        taken=tuple(taking.taken),
        left=taking.left,
    )
    claimed = sum(group.size_bytes for group in plan.taken)
    if claimed > source.size_bytes:  # An expanded tensor could claim any size.
        raise IntegrityError(
            f"its tensors claim {claimed} bytes, and the file has {source.size_bytes}",
            key=source.name,
            hint="Save expanded tensors with .contiguous().",
        )
    return plan


def spec_of(key: str, tensor: torch.Tensor | SourceTensor) -> TensorSpec:
    """Return the TensorSpec of a group's tensor: its name without the group, dtype and shape."""
    dtype = tensor.dtype if isinstance(tensor, SourceTensor) else DTYPES[tensor.dtype]
    return TensorSpec(key.partition("/")[2], dtype, tuple(tensor.shape))


def _step_of(source: Source) -> int:
    for name in ("global_step", "step"):
        value = (source.about or source.values).get(name)
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_cpu and value.layout == torch.strided:
            value = source.copied(value).item()
        if type(value) is int or (isinstance(value, float) and value.is_integer()):
            return int(value)
    return 0
