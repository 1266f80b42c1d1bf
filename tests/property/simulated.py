"""A system whose clocks, threads, random numbers and names come from a schedule."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from greenlet import getcurrent  # type: ignore[import-untyped]

from ckpt_tasks.state.tensors.random_streams import preserved_rng, seed_streams
from ckpt_tasks.system import System
from tests.property.schedules import Schedule

__all__ = ["SimulatedSystem", "alone"]


@contextmanager
def alone() -> Iterator[None]:
    """Start from the same random streams, and leave nothing behind, neither streams nor objects.

    What is alive already is no concern of the garbage collector's meanwhile: that alone takes half of the time.
    """
    with preserved_rng():
        seed_streams(0)
        gc.freeze()
        try:
            yield
        finally:
            gc.collect()  # a Checkpointer that is left would commit at the interpreter's end


class SimulatedSystem(System):
    """What a process of a schedule runs on: it is interrupted at requests and waits only."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule

    def time(self) -> float:
        return self._schedule.now_s

    def monotonic(self) -> float:
        return self._schedule.now_s

    def age_s(self) -> float:
        return self._schedule.now_s

    def sleep(self, seconds: float) -> None:
        self._schedule.sleep(seconds)

    def start_thread(self, target: Callable[..., None], *arguments: Any, name: str, daemon: bool = True) -> Any:
        return _Thread(self._schedule, partial(target, *arguments))

    def lower_priority(self) -> None:
        """Do nothing: the thread is the test's own."""

    def lock(self) -> Any:
        return _Lock(self._schedule)

    def event(self) -> Any:
        return _Event(self._schedule)

    def condition(self) -> Any:
        return _Condition(self._schedule)

    def local(self) -> Any:
        return _Local()

    def queue(self) -> Any:
        return _Queue(self._schedule)

    def token_hex(self, size_bytes: int) -> str:
        return self._schedule.rng.randbytes(size_bytes).hex()

    def uniform(self, low: float, high: float) -> float:
        return self._schedule.rng.uniform(low, high)

    def host(self) -> str:
        # Every process lives on a host of its own, or they would be told from each other by the test's process id.
        return self._schedule.process.name


class _Local:
    """What each greenlet has of its own."""

    def __init__(self) -> None:
        object.__setattr__(self, "_of_process", WeakKeyDictionary())

    def __getattr__(self, name: str) -> Any:
        try:
            return self._of_process[getcurrent()][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._of_process.setdefault(getcurrent(), {})[name] = value


class _Event:
    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return self._schedule.wait(self.is_set, timeout)


class _Thread:
    def __init__(self, schedule: Schedule, target: Callable[[], None]):
        self._target = target
        self._done = _Event(schedule)
        schedule.spawn(self._run)

    def join(self, timeout: float | None = None) -> None:
        self._done.wait(timeout)

    def is_alive(self) -> bool:
        return not self._done.is_set()

    def _run(self) -> None:
        self._target()
        self._done.set()


class _Lock:
    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        self._held = False

    def __enter__(self) -> None:
        self._schedule.wait(lambda: not self._held)
        self._held = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._held = False


class _Condition:
    """A condition whose lock nobody has to wait for: who holds it waits for nothing else, and makes no request."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        self._times = 0

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return

    def notify_all(self) -> None:
        self._times += 1

    def wait(self, timeout: float | None = None) -> bool:
        seen = self._times
        return self._schedule.wait(lambda: self._times > seen, timeout)

    def wait_for(self, until: Callable[[], bool], timeout: float | None = None) -> bool:
        return self._schedule.wait(until, timeout)


class _Queue:
    """What stands for a SimpleQueue."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        self._schedule.wait(lambda: bool(self._items))
        return self._items.popleft()
