"""`ShuffleBuffer`: an order within a window that a resume brings back, from a small state."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks import ShuffleBuffer
from ckpt_tasks.errors import StateMismatchError


class Counted:
    """Numbers with a state; it counts how many have been read."""

    def __init__(self, size: int):
        self.size, self.at, self.read = size, 0, 0

    def __iter__(self) -> Any:
        while self.at < self.size:
            self.at, self.read = self.at + 1, self.read + 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@given(size=st.integers(0, 60), buffer=st.integers(1, 20), stop=st.integers(0, 60), again=st.integers(0, 60))
def test_it_goes_on_where_it_was(size: int, buffer: int, stop: int, again: int) -> None:
    """P22: stopped at any sample, twice: the samples are the same, and at most two buffers of them are read again."""
    whole = [*ShuffleBuffer(Counted(size), buffer, seed=3)]
    assert sorted(whole) == [*range(size)]
    state, at = None, 0
    for wanted in (stop, again, size):
        stream = Counted(size)
        one = ShuffleBuffer(stream, buffer, seed=3)
        if state is not None:
            one.load_state_dict(json.loads(json.dumps(state)))
        samples = iter(one)
        taken = min(wanted, size - at)
        assert [next(samples) for _ in range(taken)] == whole[at : at + taken]
        assert stream.read <= taken + 3 * buffer
        at, state = at + taken, one.state_dict()
    assert at == size


def test_it_mixes_within_its_window() -> None:
    """A sample moves by less than `size` places, by a quarter of that on average; orders differ."""
    one = ShuffleBuffer(Counted(4000), 100, seed=1)
    order = [*one]
    moved = [abs(number - at) for at, number in enumerate(order)]
    assert max(moved) < 100
    assert 20 < sum(moved) / len(moved) < 30
    assert len({number for number in range(3999) if order.index(number + 1) == order.index(number) + 1}) < 100
    one.set_epoch(1)
    orders = [order, [*one], [*ShuffleBuffer(Counted(4000), 100, seed=2)]]
    assert len({tuple(o) for o in orders}) == 3


def test_its_state_is_small_and_of_its_own_order() -> None:
    """P50: no sample is in it; another size or seed is refused."""
    one = ShuffleBuffer(Counted(4000), 1000)
    samples = iter(one)
    for _ in range(1500):
        next(samples)
    state = one.state_dict()
    assert len(json.dumps(state)) < 200
    for other in (ShuffleBuffer(Counted(9), 999), ShuffleBuffer(Counted(9), 1000, seed=1)):
        with pytest.raises(StateMismatchError, match="another order"):
            other.load_state_dict(state)
