"""The contract of a store.

A store holds named objects; only `replace` changes an existing one. Names are relative
("checkpoint_…/e000001-…/manifest.json"); `format.keys` builds them, and a store checks them before it touches a path.
The contract:

* `put` and `put_if_absent` return when the object and its name are durable. If they raise, the object may be absent or
  whole; after `put`, whose name only one attempt uses, also partial.
* `put_if_absent` never replaces: of any number of writers of one name exactly one wins, and every reader sees the
  winner's bytes.
* `get`, `read`, `size` and `names` see a new object at once, from every host.
* `delete` is idempotent.
* A store neither retries nor caches. A failure raises StoreError, a missing object ObjectNotFoundError, and an object
  that differs from what was written (too short, too long, unreadable, not a file) IntegrityError. Only `put_if_absent`
  may also raise CommitUncertainError: the object can be read, but may not be durable.

The interface follows restic's (github.com/restic/restic, internal/backend).

Stores report progress (`moved`), and a thread that waits for a write watches it (`watching`): a time limit alone cannot
tell a slow store from a stuck one. The callback is in a context variable: it follows a call into the event loop, and
the heartbeat's requests do not count as progress of an upload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

from ckpt_tasks.errors import CkptError, ConfigError
from ckpt_tasks.format.keys import is_object_name

# The URL schemes of object stores, each with fsspec's name of its file system.
SCHEMES = {"s3": "s3", "s3a": "s3", "az": "abfs", "abfs": "abfs", "gs": "gs", "gcs": "gs", "memory": "memory"}


_T = TypeVar("_T")


class ReadableStore(Protocol):
    """The part of a store that a restore needs.

    `near`: reading costs little more than a copy in memory, so that reading twice is cheaper than keeping the bytes.
    `gap_bytes`: reading up to this many unneeded bytes costs less than another request.
    """

    url: str
    near: bool

    @property
    def gap_bytes(self) -> int: ...

    def get(self, name: str, max_bytes: int) -> bytes:
        """Return an object's bytes; raise StoreError if the object is larger than `max_bytes`."""

    def read(self, name: str, begin: int, into: memoryview) -> None:
        """Fill a buffer with the object's bytes from byte `begin` on; raise StoreError if the object ends early."""

    def size(self, name: str) -> int:
        """Return an object's size in bytes."""


class Store(ReadableStore, Protocol):
    """A store for objects; the module's docstring has the contract.

    `endpoint` is the server's URL, None for a local directory.
    """

    @property
    def endpoint(self) -> str | None: ...

    def put(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        """Write a new object from consecutive buffers; raise ObjectExistsError if the name is taken."""

    def put_if_absent(self, name: str, body: bytes) -> None:
        """Write a small object if no object has the name; raise ObjectExistsError if the name is taken."""

    def adopt(self, source: Store, name: str, size_bytes: int) -> bool:
        """Copy an object of another store under the same name, without sending its bytes through this process.

        Returns False if that is impossible, or if another object has the name. Checks only the size: raises
        IntegrityError if the source's size differs.
        """

    def replace(self, name: str, body: bytes) -> None:
        """Write or overwrite a small object: a heartbeat, or format.json if the endpoint changes."""

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        """List the names that begin with `prefix` in order, `limit` at most; raise ConfigError for an invalid prefix.

        A prefix is "" or ends with a slash.
        """

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the sizes of several objects in bytes, in order; raises as `size` does."""

    def delete(self, name: str) -> None:
        """Delete an object; do not raise if it is missing."""

    def delete_all(self, names: Sequence[str]) -> dict[str, CkptError]:
        """Delete several objects, in this order if the store can; return the errors by name.

        Raises StoreError if the store does not answer: then any of the objects may be deleted.
        """

    def drop_unfinished(self, dead: Callable[[str], bool]) -> None:
        """Free the space of unfinished writes to names for which `dead(name)` is True: their writers are gone."""

    def assume_single_writer(self) -> None:
        """Check for the name before every later `put_if_absent`, because the store has no conditional put."""

    def keep_room(self) -> None:
        """Reserve room for the ledger, so that it can be written when the disk is full; never raises."""


def check_name(name: str) -> None:
    """Raise ConfigError if no object can have this name."""
    if not is_object_name(name):
        raise ConfigError(f"{name!r:.100} is not an object name")


def base_of(prefix: str) -> str:
    """Return a prefix without the slash at its end; raise ConfigError if no object's name can begin with it."""
    base = prefix.rstrip("/")
    if base and not is_object_name(base):
        raise ConfigError(f"{prefix!r} is not a prefix")
    return base


_watch: ContextVar[Callable[[], None] | None] = ContextVar("ckpt_progress", default=None)


@contextmanager
def watching(on_progress: Callable[[], None]) -> Iterator[None]:
    """Call `on_progress` whenever a store has received or delivered bytes for this thread."""
    token = _watch.set(on_progress)
    try:
        yield
    finally:
        _watch.reset(token)


def watched() -> Callable[[], None]:
    """Return this thread's progress callback; other threads may call it, too."""
    return _watch.get() or (lambda: None)


def moved() -> None:
    """Call the progress callback: a store has answered, or bytes have arrived."""
    watched()()


class OneByOne:
    """The calls about several objects, for stores that need one request per object."""

    def sizes(self: Store, names: Sequence[str]) -> list[int]:
        return [*map(self.size, names)]

    def delete_all(self: Store, names: Sequence[str]) -> dict[str, CkptError]:
        refused: dict[str, CkptError] = {}
        for name in names:
            try:
                self.delete(name)
            except CkptError as error:
                refused[name] = error
        return refused


class WrappedStore(OneByOne):
    """A store that forwards every call to `inner` by `_forward`; a call about several objects becomes one call each."""

    def __init__(self, inner: Store):
        self.inner = inner
        self.url = inner.url
        self.near = inner.near

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def endpoint(self) -> str | None:
        """The server's URL; None for a local directory."""
        return self.inner.endpoint

    @property
    def gap_bytes(self) -> int:
        """Reading up to this many unneeded bytes costs less than another request."""
        return self.inner.gap_bytes

    def _forward(self, request: Callable[[], _T]) -> _T:
        return request()

    def put(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        self._forward(lambda: self.inner.put(name, body))

    def put_if_absent(self, name: str, body: bytes) -> None:
        self._forward(lambda: self.inner.put_if_absent(name, body))

    def adopt(self, source: Store, name: str, size_bytes: int) -> bool:
        return self._forward(lambda: self.inner.adopt(inner_store(source), name, size_bytes))

    def replace(self, name: str, body: bytes) -> None:
        self._forward(lambda: self.inner.replace(name, body))

    def get(self, name: str, max_bytes: int) -> bytes:
        return self._forward(lambda: self.inner.get(name, max_bytes))

    def read(self, name: str, begin: int, into: memoryview) -> None:
        self._forward(lambda: self.inner.read(name, begin, into))

    def size(self, name: str) -> int:
        return self._forward(lambda: self.inner.size(name))

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        return self._forward(lambda: self.inner.names(prefix, limit))

    def delete(self, name: str) -> None:
        self._forward(lambda: self.inner.delete(name))

    def drop_unfinished(self, dead: Callable[[str], bool]) -> None:
        self._forward(lambda: self.inner.drop_unfinished(dead))

    def assume_single_writer(self) -> None:
        self.inner.assume_single_writer()

    def keep_room(self) -> None:
        self.inner.keep_room()


class WatchedStore(WrappedStore):
    """A store that reports the size in bytes of every read."""

    def __init__(self, inner: Store, on_progress: Callable[[int], None]):
        super().__init__(inner)
        self._on_progress = on_progress

    def get(self, name: str, max_bytes: int) -> bytes:
        data = super().get(name, max_bytes)
        self._on_progress(len(data))
        return data

    def read(self, name: str, begin: int, into: memoryview) -> None:
        super().read(name, begin, into)
        self._on_progress(into.nbytes)


def inner_store(store: Store) -> Store:
    """Return the store inside all wrappers."""
    while isinstance(store, WrappedStore):
        store = store.inner
    return store
