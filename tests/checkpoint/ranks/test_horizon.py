"""horizon.py: what one rank wishes falls on one step in all ranks, and costs nothing while there is no wish."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from ckpt_tasks.checkpoint.ranks.exchange import StoreExchange
from ckpt_tasks.checkpoint.ranks.horizon import Horizon
from ckpt_tasks.system import System, use


class Counting(StoreExchange):
    """Count how often this rank looks for a word."""

    looks = 0

    def look(self, topic: str) -> bytes | None:
        self.looks += 1
        return super().look(topic)


class Clock(System):
    """A clock that the test moves."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Iterator[Clock]:
    before = use(made := Clock())
    yield made
    use(before)


@pytest.mark.parametrize("size", [2, 1000])
def test_rank_0_looks_for_wishes_once_whatever_the_number_of_ranks(size: int, clock: Clock) -> None:
    """A wish of the last rank becomes an order for all at one step; before and after it a look is one request."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    exchange = Counting(store, 0, size, "run")
    first, last = Horizon(exchange, 60), Horizon(StoreExchange(store, size - 1, size, "run"), 60)

    def looks(step: int) -> int:
        before = exchange.looks
        clock.now_s += 0.06  # longer than a look counts
        assert first.at(step, None) is None
        return exchange.looks - before

    assert [looks(step) for step in (1, 2)] == [1, 1]
    last.at(1, "save")
    assert looks(3) == size  # each rank's own word, once
    assert looks(4) == 1
    orders = []
    for step in range(5, 20):
        clock.now_s += 0.06  # longer than a look counts
        orders += [[horizon.at(step, None) for horizon in (first, last)]]
    assert [order for order in orders if order != [None, None]] == [["save", "save"]]
