"""How far apart two tensors are: every bit counts, and the largest difference is exact."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.checkpoint.transfer.distance import Distance, distance
from ckpt_tasks.format.layout.image import STORED_DTYPES


def bits(dtype: str, *patterns: bytes) -> torch.Tensor:
    """Make a tensor of a dtype from the bytes of its elements."""
    return torch.frombuffer(bytearray(b"".join(patterns)), dtype=torch.uint8).view(getattr(torch, dtype))


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's warning of its own dtype
@pytest.mark.parametrize("dtype", [dtype for dtype in STORED_DTYPES if hasattr(torch, dtype)])
def test_one_bit_in_any_dtype(dtype: str) -> None:
    """P6: in every dtype one changed bit is one differing element, and equal bits, whatever they mean, are none."""
    width = STORED_DTYPES[dtype].nbytes
    same, other = bytes([0] * width), bytes([1] + [0] * (width - 1))
    a = bits(dtype, same, same, other)
    assert distance(a, a.clone()) == Distance(3)
    far = distance(a, bits(dtype, same, other, other))
    assert (far.elements, far.differing) == (3, 1)
    assert far.unmeasured or (far.max_abs is not None and far.max_abs > 0)


INF = math.inf
CASES: list[tuple[Any, Any, torch.dtype, Distance]] = [
    ([0.0, 1.0], [-0.0, 1.0], torch.float32, Distance(2, 1, 0, 0.0)),
    ([INF, INF], [INF, INF], torch.float32, Distance(2)),
    ([INF, INF], [INF, 1.0], torch.float32, Distance(2, 1, 0, INF)),
    ([INF, INF], [INF, -INF], torch.float32, Distance(2, 1, 0, INF)),
    ([True, False], [True, True], torch.bool, Distance(2, 1, 0, 1)),
    ([1 + 1j, 2 + 2j], [4 + 5j, 2 + 2j], torch.complex64, Distance(2, 1, 0, 5.0)),
    ([1 + 1j, 2 + 2j], [4 + 5j, 2 + 2j], torch.complex128, Distance(2, 1, 0, 5.0)),
]


@pytest.mark.parametrize(("a", "b", "dtype", "expected"), CASES)
def test_how_far_apart(a: Any, b: Any, dtype: torch.dtype, expected: Distance) -> None:
    """The sign of zero is a difference of 0.0; infinity, truth values and complex numbers have a size."""
    assert distance(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)) == expected


def test_nan_payloads() -> None:
    """P62: NaNs of one payload are equal, of two they differ, and neither has a size."""
    quiet, loud = b"\x00\x00\xc0\x7f", b"\x01\x00\xc0\x7f"
    a = bits("float32", quiet, quiet, b"\x00\x00\x80\x3f")
    assert distance(a, a.clone()).differing == 0
    assert distance(a, bits("float32", quiet, loud, b"\x00\x00\x00\x40")) == Distance(3, 2, 1, 1.0)


@given(dtype=st.sampled_from(["int64", "uint64", "int32", "uint16", "int8"]), data=st.data())
def test_whole_numbers_are_exact(dtype: str, data: st.DataObject) -> None:
    """The largest difference of whole numbers is exact, also where it does not fit their type."""
    kind = torch.iinfo(getattr(torch, dtype))
    pairs = data.draw(st.lists(st.tuples(*[st.integers(kind.min, kind.max)] * 2), min_size=1, max_size=6))
    a, b = (torch.tensor(side, dtype=getattr(torch, dtype)) for side in zip(*pairs, strict=True))
    apart = [abs(x - y) for x, y in pairs if x != y]
    assert distance(a, b) == Distance(len(pairs), len(apart), 0, max(apart, default=None))


def test_views_and_long_tensors() -> None:
    """A strided view compares like any other, and a tensor longer than what is measured at once is compared whole."""
    a = torch.zeros(2, (1 << 20) + 3)
    b = a.clone()
    b[0, 0], b[1, -1] = 1.0, -2.0
    assert distance(a.T, b.T) == Distance(a.numel(), 2, 0, 2.0)
