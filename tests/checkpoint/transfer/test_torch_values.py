"""The values of a torch file: torch reads every value as it was; what it would not read is refused."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.checkpoint.transfer.export_torch import frame_of, live_value
from ckpt_tasks.format.tree import TensorRef, Typed

WHOLE = st.integers(-(2**2039), 2**2039 - 1)
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | WHOLE
    | st.floats()
    | st.text(st.characters(codec=None), max_size=20)
    | st.binary(max_size=20)
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=3))
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.sets(st.integers() | st.text(max_size=3), max_size=4)
        | st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=20,
)


def none(ref: TensorRef) -> torch.Tensor:
    raise AssertionError(ref)


def read(value: Any) -> Any:
    """Read a value as torch reads it from the file that is made for it."""
    frame = frame_of(live_value(value, none))
    return torch.load(io.BytesIO(b"".join(piece for _, piece in frame.pieces)), weights_only=True)


def shown(value: Any) -> Any:
    """Write a value with its types, so that NaN is NaN and 0 is not False, and sets in an order."""
    if isinstance(value, dict):
        return type(value), [(shown(key), shown(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [*map(shown, value)]
    return (set, sorted(map(repr, value))) if isinstance(value, set) else repr(value)


@given(VALUES)
def test_every_value_comes_back(value: Any) -> None:
    """P40: plain values and containers of them come back equal and of the same types, through torch."""
    assert shown(read(value)) == shown(value)


def test_what_torch_has_names_for() -> None:
    """A dtype, a device and a size are torch's own again."""
    names = [Typed("~torch", head, {}) for head in (("dtype", "bfloat16"), ("device", "cuda:1"), ("size", [2, 3]))]
    found = read(names)
    assert found == [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])]
    assert type(found[2]) is torch.Size
