"""The shuffle: a bijection of every size, the same on every machine, and even enough."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.state.sampler import Permutation


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1023, 1024, 1025, 4097])
def test_every_sample_comes_once(size: int) -> None:
    """A permutation of any size, powers of two and their neighbours too, gives each element exactly once."""
    for key in ("0/0", "0/1", "3/7"):
        assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == list(range(size))


@given(size=st.integers(1, 2**62), data=st.data())
def test_any_position_of_a_huge_set_stands_alone(size: int, data: st.DataObject) -> None:
    """An element is the same asked for alone or among others, at any size, and stays in range."""
    position = st.integers(0, size - 1)
    positions = np.array(data.draw(st.lists(position, min_size=1, max_size=20, unique=True)), dtype=np.int64)
    permutation = Permutation(size, "key")
    together = permutation(positions)
    assert together.dtype == np.int64
    assert [permutation(positions[i : i + 1]).item() for i in range(len(positions))] == together.tolist()
    assert len(set(together.tolist())) == len(positions)
    assert together.min() >= 0
    assert together.max() < size


def test_the_order_is_pinned() -> None:
    """P24: a seed gives the order that it gave when the first checkpoints were written (else raise ORDER_VERSION)."""
    assert Permutation(100, "7/2")(np.arange(8)).tolist() == [26, 88, 95, 67, 49, 90, 3, 71]
    assert Permutation(2**62, "7/2")(np.array([0, 2**62 - 1])).tolist() == [418521823847432618, 30249234677619480]


@pytest.mark.parametrize("size", [7, pytest.param(100, marks=pytest.mark.slow), 1000])
def test_it_shuffles(size: int) -> None:
    """Over many epochs each element is as likely in each place, and neighbours are no nearer than by chance."""
    epochs = 4000
    orders = np.stack([Permutation(size, f"0/{epoch}")(np.arange(size)) for epoch in range(epochs)])
    counts = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    expected = epochs / size
    assert ((counts - expected) ** 2 / expected).sum() / size**2 < 1.2  # about 1 by chance; 100 and more for no shuffle
    steps = np.bincount(((orders[:, 1:] - orders[:, :-1]) % size).ravel(), minlength=size)[1:]
    assert ((steps - steps.mean()) ** 2 / steps.mean()).sum() / size < 1.2
