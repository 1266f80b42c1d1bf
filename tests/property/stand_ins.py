"""What the code under test takes for its modules `time`, `threading` and `secrets`, and for its store, on a schedule.

Nothing of the project's own is replaced but where the store comes from: the names below are those through which its
modules reach the world outside. Beside them, three numbers are made fit for small and quick schedules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass
from datetime import datetime, tzinfo
from functools import lru_cache, partial
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
import tenacity

from ckpt_tasks.checkpoint import checkpointer, held_run
from ckpt_tasks.format import ledger
from ckpt_tasks.format.index import read_index
from ckpt_tasks.format.ledger import Entry
from ckpt_tasks.ledger import history, ownership, steps
from ckpt_tasks.reading import leasing, opening, reading, restore
from ckpt_tasks.saving import parts, pipeline, rank_saver, saver
from ckpt_tasks.state import capture as capturing
from ckpt_tasks.state import restoring
from ckpt_tasks.state.capture import capture, plan_restore
from ckpt_tasks.storage import retrying
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.port import Store
from ckpt_tasks.upkeep import pruning, upkeep
from tests.property.schedules import Schedule

__all__ = ["Threads", "clock", "put_in"]


def put_in(patch: pytest.MonkeyPatch, schedule: Schedule, store: Callable[[], Store]) -> None:
    """Have every module of the protocol live on a schedule, with `store` to reach the run directory."""
    threads = Threads(schedule)
    names = SimpleNamespace(token_hex=lambda size_bytes: schedule.rng.randbytes(size_bytes).hex())
    ours = (history, ownership, steps, upkeep, reading, leasing, restore, checkpointer, saver, pipeline, retrying)
    for module in (*ours, tenacity, tenacity.nap):
        patch.setattr(module, "time", clock(schedule))
    for module in (history, ownership, reading):
        patch.setattr(module, "secrets", names)
    for module in (ownership, pipeline, pruning, rank_saver, saver):
        patch.setattr(module, "threading", threads)
    patch.setattr(history, "datetime", SimpleNamespace(now=partial(_now, schedule)))
    # Every process lives on a host of its own, or they would be told from each other by a number that is the test's.
    patch.setattr(ownership, "socket", SimpleNamespace(gethostname=lambda: schedule.process.name))
    for module in (history, retrying):
        patch.setattr(module, "_dice", schedule.rng)
    # What a dataclass makes by default was bound when the class was made.
    patch.setattr(saver, "Snapshot", partial(_snapshot, schedule))
    for module in (pipeline, pruning, rank_saver):
        patch.setattr(module, "lower_priority", lambda: None)  # it would be the test's own thread
    patch.setattr(held_run, "end_with_interpreter", lambda _: None)  # at its end there is no schedule to wait on
    patch.setattr(Location, "open", lambda *_: store())
    # The random streams of this process are not those of the simulated ones, and need no guard.
    patch.setattr(checkpointer, "capture", partial(capture, rng=False))
    patch.setattr(restore, "plan_restore", lambda *args, **options: plan_restore(*args, **{**options, "rng": False}))
    patch.setattr(parts, "_REUSED_BYTES", 1)  # everything here is small
    patch.setattr(upkeep, "READ_BYTES", 1 << 16)
    patch.setattr(ownership, "_POLL_S", 5.0)  # who waits asks less often
    for module in (capturing, restoring):
        patch.setattr(module, "preserved_rng", nullcontext)
    # What is read over and over is parsed once, and what is written is not copied before: nobody changes either.
    patch.setattr(Entry, "from_bytes", staticmethod(lru_cache(Entry.from_bytes)))
    patch.setattr(opening, "read_index", lru_cache(read_index))
    patch.setattr(ledger, "asdict", _as_dict)


def _as_dict(value: Any) -> Any:
    """Do what dataclasses.asdict does, without copies of what nobody changes."""
    if is_dataclass(value):
        return {name: _as_dict(one) for name, one in vars(value).items() if name in value.__dataclass_fields__}
    return [_as_dict(one) for one in value] if isinstance(value, tuple) else value


def clock(schedule: Schedule, **instead: Callable[[], float]) -> SimpleNamespace:
    """Return what stands for `time`, some of its functions replaced."""

    def now() -> float:
        return schedule.now_s

    return SimpleNamespace(**{"time": now, "monotonic": now, "perf_counter": now, "sleep": schedule.sleep, **instead})


def _snapshot(schedule: Schedule, **fields: Any) -> pipeline.Snapshot:
    return pipeline.Snapshot(known=_Event(schedule), digested=_Queue(schedule), **fields)  # type: ignore[arg-type]


def _now(schedule: Schedule, zone: tzinfo) -> datetime:
    return datetime.fromtimestamp(schedule.now_s, zone)


class Threads:
    """What stands for `threading`: threads of a schedule are interrupted at requests and waits only."""

    def __init__(self, schedule: Schedule):
        self.Thread = partial(_Thread, schedule)
        self.Event = partial(_Event, schedule)
        self.Condition = partial(_Condition, schedule)
        self.Lock = partial(_Lock, schedule)


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
    def __init__(
        self,
        schedule: Schedule,
        target: Callable[..., None],
        args: Sequence[Any] = (),
        name: str = "",
        daemon: bool | None = None,
    ):
        self._schedule = schedule
        self._target = partial(target, *args)
        self._done = _Event(schedule)

    def start(self) -> None:
        self._schedule.spawn(self._run)

    def join(self, timeout: float | None = None) -> None:
        self._done.wait(timeout)

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
