"""The copy of a state for dcp.async_save, in reused memory: to touch new memory takes several times as long as a copy.

Invariant: memory is reused only after `write_data` in this process has written its contents. If another process saves
(DCP's PROCESS executor shares the memory with it), that memory is not reused.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckpt_tasks.format.tree import MAPPINGS, SEQUENCES, SETS
from ckpt_tasks.format.tree import ref_like as made_like
from ckpt_tasks.process import Process
from ckpt_tasks.state.tensors.placements import is_sharded, like, local_of
from ckpt_tasks.state.tensors.tensors import copy_all
from ckpt_tasks.state.tensors.value_kinds import KINDS, kind_of_value
from ckpt_tasks.system import system

_Memory = list[torch.Tensor]


class Staged:
    """The memory of one copy; `free` gives it to the next copy."""

    def __init__(self, memory: _Memory):
        self.memory = memory
        self._process = Process()

    def free(self) -> None:
        """Let the next copy in this process use this memory."""
        if self._process.is_here:
            with _lock:
                _free[:] = [self.memory]


_free: list[_Memory] = []
_lock = system().lock()


def stage(state: Mapping[str, Any]) -> tuple[dict[str, Any], Staged]:
    """Copy a state with all its tensors and arrays to the CPU, also in every container that can be stored; wait for it.

    Other values are not copied, as by DCP's own writer.
    """
    with _lock:
        old, _free[:] = (_free[0] if _free else []), []
    copies = _Copies(old)
    made = copies.of(state)
    copy_all(copies.pairs)
    if copies.waits:
        torch.accelerator.synchronize()
    return made, Staged(copies.memory)


class _Copies:
    """Makes the tensors of a copy; `old` is the memory of the last copy, in the order of its tensors."""

    def __init__(self, old: _Memory):
        self._old = old
        self.memory: _Memory = []
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waits = False

    def of(self, value: Any) -> Any:
        """Return a copy of a value in which tensors are allocated but not filled."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        kind = type(value)
        if isinstance(value, Mapping):
            items = {name: self.of(item) for name, item in value.items()}
            return made_like(value, items) if kind in MAPPINGS and kind is not dict else items
        if kind in SEQUENCES or kind in SETS:
            made = [self.of(item) for item in value]
            return kind(made) if kind in (list, tuple, *SETS) else made_like(value, made)
        if isinstance(value, (np.ndarray, bytearray, io.BytesIO)):
            return copy.copy(value)
        if (tag := kind_of_value(value)) is not None and KINDS[tag].place:
            head, parts = KINDS[tag].take(value)
            return KINDS[tag].build(head, {name: self.of(part) for name, part in parts.items()}, value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and kind_of_value(tensor) is None
        if not plain and not is_sharded(tensor):
            return copy.deepcopy(tensor)  # For example a ShardedTensor, or a sparse tensor.
        source = local_of(tensor).detach()
        at = len(self.memory)
        into = self._old[at] if at < len(self._old) else None
        if into is None or into.shape != source.shape or into.dtype != source.dtype:
            into = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self.memory.append(into)
        self.pairs.append((into, source))
        self.waits |= not source.is_cpu
        return like(into, tensor) if is_sharded(tensor) else into
