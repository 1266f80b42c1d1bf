"""The distance of two tensors: how many elements have different bits, and the largest difference of values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_AT_ONCE = 1 << 20  # Subtract at most this many elements at once, to bound the memory for differences in float64.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Distance:
    """How many elements were compared, how many have different bits, and the largest difference.

    `unmeasured` counts the `differing` elements without a difference: at least one side is NaN, or the dtype is packed.
    `max_abs` is the largest absolute difference of the other differing elements, an int for whole numbers; None if
    there are no others. -0.0 and 0.0 differ by 0.0.
    """

    elements: int = 0
    differing: int = 0
    unmeasured: int = 0
    max_abs: float | None = None

    def __add__(self, other: Distance) -> Distance:
        known = [value for value in (self.max_abs, other.max_abs) if value is not None]
        return Distance(
            self.elements + other.elements,
            self.differing + other.differing,
            self.unmeasured + other.unmeasured,
            max(known, default=None),
        )


@torch.no_grad()
def distance(a: torch.Tensor, b: torch.Tensor) -> Distance:
    """Compare two CPU tensors of one dtype and shape bit for bit."""
    total = Distance()
    for part_a, part_b in zip(*(torch.split(t.reshape(-1), _AT_ONCE) for t in (a, b)), strict=True):
        differ = _bits(part_a) != _bits(part_b)
        if differ.dim() == 2:  # A complex number differs if its real or its imaginary part differs.
            differ = differ.any(1)
        total += _measure(part_a, part_b, differ)
    return total


def _measure(a: torch.Tensor, b: torch.Tensor, differ: torch.Tensor) -> Distance:
    places = differ.nonzero().reshape(-1)
    count = len(places)
    if not count:
        return Distance(len(differ))
    if not (a.is_floating_point() or a.is_complex()):
        return Distance(len(differ), count, 0, _whole(_bits(a)[places], _bits(b)[places], a.dtype))
    wide = torch.complex128 if a.is_complex() else torch.float64
    try:
        apart = (_pick(a, places).to(wide) - _pick(b, places).to(wide)).abs()
    except (RuntimeError, NotImplementedError):  # Packed elements have no values to subtract.
        return Distance(len(differ), count, count, None)
    measured = apart[~apart.isnan()]
    return Distance(len(differ), count, count - len(measured), float(measured.max()) if len(measured) else None)


def _pick(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(torch.view_as_real(tensor)[places].to(torch.float64))
    return _bits(tensor)[places].view(tensor.dtype)  # Few kernels support the rare dtypes, so select their bits.


def _whole(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> int:
    # The subtraction may wrap around, but its bits, read as an unsigned number of the same width, are exact.
    name = "uint8" if dtype == torch.bool else str(dtype).removeprefix("torch.")
    one, other = a.numpy().view(name), b.numpy().view(name)
    apart = np.maximum(one, other) - np.minimum(one, other)
    return int(apart.view(f"u{apart.itemsize}").max())


def _bits(flat: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return real.contiguous().view(_BITS[real.element_size()])
