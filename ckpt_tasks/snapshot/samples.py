"""Samples of the tensors that several ranks hold alike: they find ranks that have drifted apart.

Each rank writes only a share of such a tensor, so no digest of what is written compares two ranks. A step that one rank
took another way changes nearly every element of every parameter, so a few slices are enough to see it. What changed a
single element is seen when its turn comes: every save looks at other tensors and slices, a 64th of all bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.snapshot.device import DeviceCopy, Devices
from ckpt_tasks.snapshot.snapshot import storable

__all__ = ["Samples", "take_samples"]

_TENSORS = 32  # about so many are looked at in one save
_SAVES = 64  # after so many, all bytes have been; later where there are more than 2,048 tensors
_WHOLE_BYTES = 4096  # a smaller tensor is looked at as a whole

Replicated = Mapping[str, tuple[torch.Tensor, tuple[int, ...]]]  # by key: what a rank holds, and where that begins


@dataclass
class Samples:
    """What one rank holds of some replicated tensors; call `digests` behind training's back."""

    _found: dict[str, str] = field(default_factory=dict)
    _copied: Sequence[tuple[str, torch.Tensor]] = ()
    _copy: DeviceCopy | None = None

    def digests(self) -> dict[str, str]:
        """Return the digests by name, the same names in all ranks that hold the same; wait for devices."""
        if self._copy is not None:
            self._copy.wait()
        return self._found | {name: _digest(copied) for name, copied in self._copied}


@torch.no_grad()
def take_samples(replicated: Replicated, turn: int, devices: Devices) -> Samples:
    """Look at some tensors as they are now; `turn` is the same in all ranks, and another one in every save.

    Tensors of the host are digested at once; those of devices are copied in the order of their streams.
    """
    every = max(1, len(replicated) // _TENSORS)
    found: dict[str, str] = {}
    waiting: list[tuple[str, torch.Tensor]] = []
    for key in [*replicated][turn % every :: every]:
        held, begin = replicated[key]
        name, part = f"{key} {[*begin]}", storable(_slice(held, turn // every, max(1, _SAVES // every)))
        if part.is_cuda:
            waiting.append((name, part))
        else:
            found[name] = _digest(part)
    if not waiting:
        return Samples(found)
    # Pinned: a device that writes to other memory keeps the host waiting for its stream.
    copied = [(name, torch.empty_like(part, device="cpu", pin_memory=True)) for name, part in waiting]
    pairs = [(into, part) for (_, into), (_, part) in zip(copied, waiting, strict=True)]
    return Samples(found, copied, devices.start(pairs))


def _slice(tensor: torch.Tensor, turn: int, count: int) -> torch.Tensor:
    """Return one of `count` slices of a tensor, or of as many as its longest axis has elements."""
    if tensor.nbytes <= _WHOLE_BYTES:
        return tensor
    axis = max(range(tensor.dim()), key=lambda axis: tensor.shape[axis])
    extent = tensor.shape[axis]
    count = min(count, extent)
    begin, end = (extent * n // count for n in (turn % count, turn % count + 1))
    return tensor.narrow(axis, begin, end - begin)


def _digest(tensor: torch.Tensor) -> str:
    tensor = tensor.contiguous()
    if not tensor.nbytes:
        return ""
    return digest_hex(memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B"))
