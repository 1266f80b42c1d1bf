"""Samples of replicated tensors: they detect ranks that have drifted apart.

Each rank writes only a share of such a tensor, so no digest of written bytes compares two ranks. A step that one rank
took differently changes nearly every element of every parameter, so a few slices detect it. A change of a single
element is detected later: every save samples other tensors and slices, a 64th of all bytes.
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

_TENSORS = 32  # sampled in one save, about
_SAVES = 64  # until all bytes have been sampled; longer with more than 2,048 tensors
_WHOLE_BYTES = 4096  # a smaller tensor is sampled whole

Replicated = Mapping[str, tuple[torch.Tensor, tuple[int, ...]]]  # by key: the rank's part, and its offset in the whole


@dataclass
class Samples:
    """One rank's samples of replicated tensors; call `digests` in the background."""

    _digests: dict[str, str] = field(default_factory=dict)
    _copied: Sequence[tuple[str, torch.Tensor]] = ()
    _copy: DeviceCopy | None = None

    def digests(self) -> dict[str, str]:
        """Wait for devices; return the digests by name, with the same names in all ranks that hold the same part."""
        if self._copy is not None:
            self._copy.wait()
        return self._digests | {name: _digest(copied) for name, copied in self._copied}


@torch.no_grad()
def take_samples(replicated: Replicated, turn: int, devices: Devices) -> Samples:
    """Sample some tensors now; `turn` must be the same in all ranks, and change with every save.

    Host tensors are digested at once; device tensors are copied in the order of their streams.
    """
    every = max(1, len(replicated) // _TENSORS)
    digests: dict[str, str] = {}
    waiting: list[tuple[str, torch.Tensor]] = []
    for key in [*replicated][turn % every :: every]:
        held, begin = replicated[key]
        name, part = f"{key} {[*begin]}", storable(_slice(held, turn // every, max(1, _SAVES // every)))
        if part.is_cuda:
            waiting.append((name, part))
        else:
            digests[name] = _digest(part)
    if not waiting:
        return Samples(digests)
    # Pinned: a copy to other memory would make the host wait for the device's stream.
    copied = [(name, torch.empty_like(part, device="cpu", pin_memory=True)) for name, part in waiting]
    pairs = [(into, part) for (_, into), (_, part) in zip(copied, waiting, strict=True)]
    return Samples(digests, copied, devices.start(pairs))


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
