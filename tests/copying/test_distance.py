"""How far apart two tensors are: every bit counts, and the largest difference is exact."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.copying.distance import Distance, distance
from ckpt_tasks.layout.image import STORED_DTYPES


def bits(dtype: str, *patterns: bytes) -> torch.Tensor:
    """Make a tensor of a dtype from the bytes of its elements."""
    return torch.frombuffer(bytearray(b"".join(patterns)), dtype=torch.uint8).view(getattr(torch, dtype))


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's warning of its own dtype
@pytest.mark.parametrize("dtype", STORED_DTYPES)
def test_one_bit_in_any_dtype(dtype: str) -> None:
    """P6: in every dtype one changed bit is one differing element, and equal bits, whatever they mean, are none."""
    width = STORED_DTYPES[dtype].nbytes
    same, other = bytes([0] * width), bytes([1] + [0] * (width - 1))
    a = bits(dtype, same, same, other)
    assert distance(a, a.clone()) == Distance(3)
    far = distance(a, bits(dtype, same, other, other))
    assert (far.elements, far.differing) == (3, 1)
    assert far.unmeasured or (far.max_abs is not None and far.max_abs > 0)


def test_the_sign_of_zero() -> None:
    """-0.0 and 0.0 differ in a bit, by 0.0."""
    assert distance(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == Distance(2, 1, 0, 0.0)


def test_nan_payloads() -> None:
    """P62: NaNs of one payload are equal, of two they differ, and neither has a size."""
    quiet, loud = b"\x00\x00\xc0\x7f", b"\x01\x00\xc0\x7f"
    a = bits("float32", quiet, quiet, b"\x00\x00\x80\x3f")
    assert distance(a, a.clone()).differing == 0
    assert distance(a, bits("float32", quiet, loud, b"\x00\x00\x80\x3f")) == Distance(3, 1, 1, None)
    assert distance(a, bits("float32", quiet, loud, b"\x00\x00\x00\x40")) == Distance(3, 2, 1, 1.0)


def test_infinity() -> None:
    """The difference to infinity is infinite; infinity and itself are equal."""
    inf = torch.tensor([math.inf, math.inf])
    assert distance(inf, inf.clone()) == Distance(2)
    assert distance(inf, torch.tensor([math.inf, 1.0])) == Distance(2, 1, 0, math.inf)
    assert distance(inf, torch.tensor([math.inf, -math.inf])).max_abs == math.inf


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int32", "uint32", "int16", "uint16", "int8", "uint8"])
@given(data=st.data())
def test_whole_numbers_are_exact(dtype: str, data: st.DataObject) -> None:
    """The largest difference of whole numbers is exact, also where it does not fit their type."""
    kind = torch.iinfo(getattr(torch, dtype))
    numbers = st.lists(st.tuples(*[st.integers(kind.min, kind.max)] * 2), min_size=1, max_size=6)
    pairs = data.draw(numbers)
    a, b = (torch.tensor(side, dtype=getattr(torch, dtype)) for side in zip(*pairs, strict=True))
    apart = [abs(x - y) for x, y in pairs if x != y]
    assert distance(a, b) == Distance(len(pairs), len(apart), 0, max(apart, default=None))


def test_truth_values() -> None:
    """Booleans differ by 1."""
    assert distance(torch.tensor([True, False]), torch.tensor([True, True])) == Distance(2, 1, 0, 1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers(dtype: torch.dtype) -> None:
    """A complex number is one element, and its difference an absolute value."""
    a = torch.tensor([1 + 1j, 2 + 2j], dtype=dtype)
    assert distance(a, a + torch.tensor([3 + 4j, 0], dtype=dtype)) == Distance(2, 1, 0, 5.0)


def test_strided_views() -> None:
    """Tensors that are cut out of larger ones compare like any other."""
    a = torch.arange(12.0).reshape(3, 4)
    b = a.clone()
    b[1, 2] += 0.5
    assert distance(a.T[1:3], b.T[1:3]) == Distance(6, 1, 0, 0.5)


def test_sums() -> None:
    """Distances of parts add up to that of the whole, and what cannot be measured adds nothing to the largest."""
    assert Distance(2, 1, 1, None) + Distance(3, 2, 0, 0.5) == Distance(5, 3, 1, 0.5)
    assert Distance() + Distance() == Distance()


def test_no_more_at_once_than_bounded() -> None:
    """A tensor longer than what is measured at once is compared whole, its last element too."""
    a = torch.zeros((1 << 20) + 3)
    b = a.clone()
    b[0], b[-1] = 1.0, -2.0
    assert distance(a, b) == Distance(len(a), 2, 0, 2.0)
