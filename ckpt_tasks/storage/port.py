"""What a store must do, and nothing more.

A store holds named objects; only `replace` changes one that is there. Names are relative
("checkpoint_…/e000001-…/manifest.json") and were built by `format.keys`; a store checks them once more before it
touches a path. The contract:

* `put` and `put_if_absent` return when the object is durable, names included; if they raise, the object may be
  absent, whole, or (for `put`, under its attempt-unique name) partial.
* `put_if_absent` never replaces: of any number of writers of one name one wins, and every reader sees its bytes.
* What was put is seen by `get`, `read`, `size` and `names` at once, from everywhere.
* `delete` is idempotent.
* Nothing here retries, caches or interprets. A failure is a StoreError, a missing object an ObjectNotFoundError, and an
  object that is there but cannot be what was written (too short, too long, unreadable, no file) an IntegrityError.
  `put_if_absent` alone may also raise CommitUncertainError: the object can be read, and may not be durable.

The interface follows restic's (github.com/restic/restic, internal/backend).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["ReadableStore", "Store"]


class ReadableStore(Protocol):
    """What a restore needs of a store.

    `near`: a byte costs little more than a copy in memory, so that reading it twice is cheaper than keeping it.
    `gap_bytes`: so many bytes that nobody wants cost less than another request.
    """

    url: str
    near: bool

    @property
    def gap_bytes(self) -> int: ...

    def get(self, name: str, max_bytes: int) -> bytes:
        """Return an object's bytes; raise StoreError where there are more than `max_bytes`."""

    def read(self, name: str, begin: int, into: memoryview) -> None:
        """Fill a buffer from the object's bytes at `begin`; raise StoreError where it ends early."""

    def size(self, name: str) -> int:
        """Return an object's size in bytes."""


class Store(ReadableStore, Protocol):
    """A place for objects; see the module's docstring for the contract.

    `endpoint` says who answers, where that is a server; None for a local directory.
    """

    @property
    def endpoint(self) -> str | None: ...

    def put(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        """Write a new object from buffers, one after the other; raise ObjectExistsError where the name is taken."""

    def put_if_absent(self, name: str, body: bytes) -> None:
        """Write a small object unless the name is taken; raise ObjectExistsError where it is."""

    def adopt(self, source: Store, name: str, size_bytes: int) -> bool:
        """Have an object of another place under the same name here, its bytes not passing through this process.

        False where that cannot be, or where something else has the name. Only its size has been looked at.
        """

    def replace(self, name: str, body: bytes) -> None:
        """Write or overwrite a small object: a heartbeat, or format.json for another endpoint."""

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        """List the names that begin with `prefix` ("" or up to a slash), in order, `limit` at most."""

    def delete(self, name: str) -> None:
        """Delete an object; a missing one is no error."""

    def drop_unfinished(self, dead: Callable[[str], bool]) -> None:
        """Free what unfinished writes left of the names that `dead` says nobody writes any more."""

    def assume_single_writer(self) -> None:
        """Look before `put_if_absent` instead of asking for a condition that the store does not have."""

    def keep_room(self) -> None:
        """Reserve room for the ledger, so that it can be written where data finds none; never raises."""
