"""Samples of the tensors that several ranks hold, to detect ranks that differ.

Each rank writes only a share of a replicated tensor, so no digest of written bytes compares two ranks. If one rank
takes a step differently, nearly every element of every parameter differs, so a few slices show it. A single differing
element is found later: every save samples other tensors and slices, a 64th of all bytes.

Rank 0 writes all tensors of values that must be equal in all ranks. Every save compares each of these tensors: a small
tensor as a whole, and one slice of a larger tensor, a different slice in each save.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ckpt_tasks.checkpoint.memory.snapshot import storable_tensors
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.state.tensors.device import DeviceCopy, Devices

_TENSORS = 32  # Each save samples about this many tensors.
_SAVES = 64  # After this many saves all bytes were sampled (after more saves if there are over 2,048 tensors).
_WHOLE_BYTES = 4096  # A smaller tensor is sampled as a whole.
_VALUE_BYTES = 1 << 16  # Sample at most about this many bytes of a tensor that all ranks share.
_VALUES_BYTES = 16 << 20  # The samples of all such tensors have together about this many bytes.
_SHOWN = 4  # A sample of so few elements holds the values themselves, for the message.

# For each key, this rank's part and the offset of the part in the whole tensor.
Replicated = Mapping[str, tuple[torch.Tensor, tuple[int, ...]]]


@dataclass
class Samples:
    """One rank's samples of tensors; call `digests` in the background."""

    _digests: dict[str, str] = field(default_factory=dict)
    _copied: Sequence[tuple[str, torch.Tensor]] = ()
    _copy: DeviceCopy | None = None

    def digests(self) -> dict[str, str]:
        """Wait for devices; return the digests by name. Ranks that hold the same bytes use the same names."""
        if self._copy is not None:
            self._copy.wait()
        return self._digests | {name: _digest(copied) for name, copied in self._copied}


@torch.no_grad()
def take_samples(replicated: Replicated, turn: int, devices: Devices) -> Samples:
    """Sample some tensors now; `turn` must be the same in all ranks, and change with every save.

    Host tensors are digested at once; device tensors are copied in the order of their streams.
    """
    every = max(1, len(replicated) // _TENSORS)
    parts: list[tuple[str, torch.Tensor]] = []
    for key in [*replicated][turn % every :: every]:
        held, begin = replicated[key]
        whole = held.nbytes <= _WHOLE_BYTES
        part = held if whole else _slice(held, turn // every, max(1, _SAVES // every))
        parts.append((f"{key} {[*begin]}", part))
    return _taken(parts, devices)


@torch.no_grad()
def sample_values(values: Mapping[str, torch.Tensor], turn: int, devices: Devices) -> Samples:
    """Sample all tensors of values that are equal in all ranks, by key; see `take_samples`."""
    most_bytes = min(_VALUE_BYTES, max(_WHOLE_BYTES, _VALUES_BYTES // max(1, len(values))))
    parts = [(key, _slice(held, turn, -(-held.nbytes // most_bytes))) for key, held in values.items()]
    return _taken(parts, devices)


def _taken(parts: Sequence[tuple[str, torch.Tensor]], devices: Devices) -> Samples:
    digests: dict[str, str] = {}
    waiting: list[tuple[str, torch.Tensor]] = []
    for name, part in parts:
        if part.is_cuda:
            waiting.append((name, storable_tensors(part)))
        else:
            digests[name] = _digest(storable_tensors(part))
    if not waiting:
        return Samples(digests)
    # Use pinned memory: for a copy to other memory the host would wait for the device's stream.
    copied = [(name, torch.empty_like(part, device="cpu", pin_memory=True)) for name, part in waiting]
    pairs = [(into, part) for (_, into), (_, part) in zip(copied, waiting, strict=True)]
    return Samples(digests, copied, devices.start(pairs))


def _slice(tensor: torch.Tensor, turn: int, count: int) -> torch.Tensor:
    """Return one of `count` slices of a tensor; of fewer slices if its longest axis has fewer elements."""
    if count <= 1:
        return tensor
    axis = max(range(tensor.dim()), key=lambda axis: tensor.shape[axis])
    extent = tensor.shape[axis]
    count = min(count, extent)
    begin, end = (extent * n // count for n in (turn % count, turn % count + 1))
    return tensor.narrow(axis, begin, end - begin)


def _digest(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype, shape and digest; the values themselves instead of the digest if they are few."""
    if tensor.numel() <= _SHOWN:
        said = str(tensor.tolist())
    else:
        tensor = tensor.contiguous()
        said = digest_hex(memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B"))
    return f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]} {said}"
