"""The objects of a simulated run directory, and the way to them: requests that fail as a schedule wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from ckpt_tasks.errors import IntegrityError, ObjectExistsError, ObjectNotFoundError, StoreError
from ckpt_tasks.storage.port import OneByOne, Store
from tests.property.schedules import Schedule

__all__ = ["Connection", "Disk", "InjectedError", "Watcher"]


class InjectedError(StoreError):
    """A request failed because the schedule wanted it to."""

    transient = True


class Watcher(Protocol):
    """Who is told of everything that happens to the objects, at the moment at which it does."""

    def landed(self, name: str, data: bytes) -> None: ...
    def deleted(self, name: str) -> None: ...


class Disk(OneByOne):
    """The objects themselves, as a store that does at once what it is asked and never fails."""

    url = "simulated"
    near = True
    gap_bytes = 0
    endpoint: str | None = None

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.watcher: Watcher | None = None

    def put(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        self.put_if_absent(name, b"".join(body))

    def put_if_absent(self, name: str, body: bytes) -> None:
        if name in self.objects:
            raise ObjectExistsError("the object exists already", key=name)
        self.replace(name, body)

    def replace(self, name: str, body: bytes) -> None:
        self.objects[name] = body
        if self.watcher is not None:
            self.watcher.landed(name, body)

    def get(self, name: str, max_bytes: int) -> bytes:
        data = self.objects.get(name)
        if data is None:
            raise ObjectNotFoundError("no such object", key=name)
        if len(data) > max_bytes:
            raise IntegrityError("the object is too large", key=name)
        return data

    def read(self, name: str, begin: int, into: memoryview) -> None:
        data = self.get(name, 1 << 62)
        if begin + into.nbytes > len(data):
            raise IntegrityError(f"the object ends at byte {len(data)}", key=name)
        into[:] = data[begin : begin + into.nbytes]

    def size(self, name: str) -> int:
        return len(self.get(name, 1 << 62))

    def adopt(self, source: Store, name: str, size_bytes: int) -> bool:
        return False

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        return sorted([name for name in self.objects if name.startswith(prefix)])[:limit]

    def delete(self, name: str) -> None:
        if self.objects.pop(name, None) is not None and self.watcher is not None:
            self.watcher.deleted(name)

    def drop_unfinished(self, dead: Callable[[str], bool]) -> None:
        """Do nothing: a write is one request here."""

    def assume_single_writer(self) -> None:
        """Do nothing: the condition is there."""

    def keep_room(self) -> None:
        """Do nothing: there is always room."""


class Connection(Disk):
    """A disk as processes reach it: every request is a moment at which others may run, and may fail."""

    def __init__(self, disk: Disk, schedule: Schedule, *, near: bool = True):
        super().__init__()
        self.near = near
        self._disk = disk
        self._schedule = schedule

    def get(self, name: str, max_bytes: int) -> bytes:
        self._ask("get", name)
        return self._disk.get(name, max_bytes)

    def read(self, name: str, begin: int, into: memoryview) -> None:
        self._ask("read", name)
        self._disk.read(name, begin, into)

    def size(self, name: str) -> int:
        self._ask("size", name)
        return self._disk.size(name)

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        self._ask("names", prefix)
        return self._disk.names(prefix, limit)

    def put(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        data = b"".join(body)  # what training changes after that is another state
        self._change("put", name, partial(self._disk.put_if_absent, name), data)

    def put_if_absent(self, name: str, body: bytes) -> None:
        self._change("put_if_absent", name, partial(self._disk.put_if_absent, name), body)

    def replace(self, name: str, body: bytes) -> None:
        self._change("replace", name, partial(self._disk.replace, name), body)

    def delete(self, name: str) -> None:
        self._change("delete", name, lambda _: self._disk.delete(name), b"")

    def _ask(self, what: str, name: str) -> None:
        if self._schedule.request(what, name) != "done":
            raise InjectedError("the store is overloaded", key=name)

    def _change(self, what: str, name: str, effect: Callable[[bytes], None], body: bytes) -> None:
        fate = self._schedule.request(what, name)
        if fate in ("late", "twice"):
            self._schedule.later(lambda: _tried(effect, body))
        if fate in ("done", "twice"):
            effect(body)
            return
        if fate in ("unanswered", "exists"):
            _tried(effect, body)
        if fate == "exists":
            raise ObjectExistsError("the object exists already", key=name)
        if fate == "torn":
            _tried(effect, body[: self._schedule.rng.randrange(len(body))])
        failure = InjectedError(f"no answer from the store ({fate})", key=name)
        failure.refused = fate == "refused"
        raise failure


def _tried(effect: Callable[[bytes], None], body: bytes) -> None:
    with suppress(ObjectExistsError):
        effect(body)
