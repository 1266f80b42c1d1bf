"""The objects of a simulated run directory, and the way to them: requests that fail as a schedule wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from ckpt_tasks.testing import Fate, FaultyStore, MemoryStore
from tests.property.schedules import Schedule

__all__ = ["Connection", "Disk", "Watcher"]


class Watcher(Protocol):
    """Who is told of everything that happens to the objects, at the moment at which it does."""

    def landed(self, name: str, data: bytes) -> None: ...
    def deleted(self, name: str) -> None: ...


class Disk(MemoryStore):
    """The objects themselves; what is done to them is done at once."""

    watcher: Watcher | None = None

    def put_if_absent(self, name: str, body: bytes) -> None:
        super().put_if_absent(name, body)
        self._landed(name, body)

    def replace(self, name: str, body: bytes) -> None:
        super().replace(name, body)
        self._landed(name, body)

    def delete(self, name: str) -> None:
        there = name in self.objects
        super().delete(name)
        if there and self.watcher is not None:
            self.watcher.deleted(name)

    def _landed(self, name: str, body: bytes) -> None:
        if self.watcher is not None:
            self.watcher.landed(name, body)


class Connection(FaultyStore):
    """A disk as processes reach it: every request is a moment at which others may run, and may fail."""

    def __init__(self, disk: Disk, schedule: Schedule, *, near: bool = True):
        super().__init__(disk)
        self.near = near
        self._schedule = schedule

    def fate_of(self, verb: str, name: str) -> Fate:
        return cast("Fate", self._schedule.request(verb, name))

    def later(self, arrive: Callable[[], None]) -> None:
        self._schedule.later(arrive)

    def part_of(self, body: bytes) -> bytes:
        return body[: self._schedule.rng.randrange(len(body))]
