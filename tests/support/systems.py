"""Systems for tests to run on: clocks and waits that they give, instead of constants that they replace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from ckpt_tasks.system import System, use

Running = TypeVar("Running", bound=System)

__all__ = ["Hurried", "Impatient", "Sleepless", "Told", "Waited", "running_on"]


@contextmanager
def running_on(system: Running) -> Iterator[Running]:
    """Run everything in the block on another system."""
    before = use(system)
    try:
        yield system
    finally:
        use(before)


class Hurried(System):
    """This machine, on which waits pass `times` as fast, by the clock that is never set."""

    def __init__(self, times: float):
        self._times = times

    def monotonic(self) -> float:
        return super().monotonic() * self._times

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds / self._times)


class Impatient(System):
    """This machine, where waits that are drawn are a fraction as long."""

    def __init__(self, times: float):
        self._times = times

    def uniform(self, low: float, high: float) -> float:
        return super().uniform(low, high) / self._times


class Sleepless(System):
    """This machine, on which a wait takes no time."""

    def sleep(self, seconds: float) -> None:
        """Return at once."""


class Told(System):
    """This machine, by a clock that moves when it is told to: how busy the machine is does not count."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Waited(System):
    """A machine whose time passes in waits alone, which take none of ours."""

    waited_s = 0.0

    def monotonic(self) -> float:
        return self.waited_s

    def sleep(self, seconds: float) -> None:
        self.waited_s += seconds
