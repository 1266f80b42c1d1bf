"""Stores that keep their word in everything but one thing."""

from __future__ import annotations

from ckpt_tasks.errors import ObjectExistsError
from ckpt_tasks.storage.port import WrappedStore


class Liar(WrappedStore):
    """A store with a server: it is tried before a run is made in it."""

    @property
    def endpoint(self) -> str | None:
        return "http://liar"


class Overwrites(Liar):
    def put_if_absent(self, name: str, body: bytes) -> None:
        self.inner.replace(name, body)


class RefusesAndOverwrites(Liar):
    def put_if_absent(self, name: str, body: bytes) -> None:
        try:
            self.inner.put_if_absent(name, body)
        except ObjectExistsError:
            self.inner.replace(name, body)
            raise


class LooksThenWrites(Liar):
    """Two writers that look at once both see nothing."""

    def put_if_absent(self, name: str, body: bytes) -> None:
        if "race" in name:
            self.inner.replace(name, body)
        else:
            self.inner.put_if_absent(name, body)


class ListsLate(Liar):
    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        return self.inner.names(prefix, limit)[:-1]


class ListsInNoOrder(Liar):
    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        return self.inner.names(prefix)[::-1][:limit]


class IgnoresRanges(Liar):
    def read(self, name: str, begin: int, into: memoryview) -> None:
        self.inner.read(name, 0, into)
