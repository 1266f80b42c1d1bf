"""A store in front of another one: whatever a subclass does not change is handed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt_tasks.storage.port import Store

__all__ = ["WrappedStore", "unwrapped"]


class WrappedStore:
    """Hand everything on to `inner`."""

    def __init__(self, inner: Store):
        self.inner = inner
        self.url = inner.url
        self.near = inner.near

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def endpoint(self) -> str | None:
        """Who answers, where that is a server."""
        return self.inner.endpoint

    @property
    def gap_bytes(self) -> int:
        """How many unwanted bytes cost less than another request."""
        return self.inner.gap_bytes

    def put(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        self.inner.put(name, body)

    def put_if_absent(self, name: str, body: bytes) -> None:
        self.inner.put_if_absent(name, body)

    def adopt(self, source: Store, name: str, size_bytes: int) -> bool:
        return self.inner.adopt(unwrapped(source), name, size_bytes)

    def replace(self, name: str, body: bytes) -> None:
        self.inner.replace(name, body)

    def get(self, name: str, max_bytes: int) -> bytes:
        return self.inner.get(name, max_bytes)

    def read(self, name: str, begin: int, into: memoryview) -> None:
        self.inner.read(name, begin, into)

    def size(self, name: str) -> int:
        return self.inner.size(name)

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        return self.inner.names(prefix, limit)

    def delete(self, name: str) -> None:
        self.inner.delete(name)

    def drop_unfinished(self, dead: Callable[[str], bool]) -> None:
        self.inner.drop_unfinished(dead)

    def assume_single_writer(self) -> None:
        self.inner.assume_single_writer()

    def keep_room(self) -> None:
        self.inner.keep_room()


def unwrapped(store: Store) -> Store:
    """Return the store behind all that stands in front of it."""
    while isinstance(store, WrappedStore):
        store = store.inner
    return store
