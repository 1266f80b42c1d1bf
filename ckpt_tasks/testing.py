"""For tests of your own flows and loops: a store in memory, a store whose requests fail, and the death of a process.

    store = FaultyStore(MemoryStore())
    config = CheckpointConfig(checkpoint_dir=located(store), memory_dir=None)
    store.on("unanswered", verb="put_if_absent", name="ledger/", times=1)

The protocol is the real one: objects live in a dict, and only the requests that you name fail.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Literal

from ckpt_tasks.checkpoint.pausing import die, elapse, images_of, look, seal, settle, under_way
from ckpt_tasks.errors import IntegrityError, ObjectExistsError, ObjectNotFoundError, StoreError
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.port import OneByOne, Store, WrappedStore, base_of, check_name
from ckpt_tasks.storage.retrying import RetryingStore

__all__ = [
    "Fate",
    "FaultRule",
    "FaultyStore",
    "InjectedError",
    "MemoryStore",
    "die",
    "elapse",
    "images_of",
    "located",
    "look",
    "seal",
    "settle",
    "under_way",
]

Fate = Literal["done", "refused", "unanswered", "exists", "late", "twice", "torn", "flipped"]
_numbers = count()


class InjectedError(StoreError):
    """A request failed because a rule of a FaultyStore says so."""

    transient = True


@dataclass(frozen=True)
class _StoreLocation(Location):
    store: Store = field(kw_only=True, repr=False, hash=False)

    def resolve(self, run_key: str | None = None) -> Location:
        return self

    def open(self, run_key: str | None = None) -> Store:
        return self.store


def located(store: Store, *, deadline_s: float | None = None) -> Location:
    """Return the location of a run in this store, for a `CheckpointConfig` or `open_run` of this process only.

    With `deadline_s`, requests that fail temporarily are retried for this many seconds, as with a server.
    """
    return _StoreLocation(store.url, store=store if deadline_s is None else RetryingStore(store, deadline_s=deadline_s))


class MemoryStore(OneByOne):
    """A store whose objects are in this process's memory: `objects` maps their names to their bytes.

    With `near=False` it is treated as a store with a server, which gets fewer requests.
    """

    gap_bytes = 0
    endpoint: str | None = None

    def __init__(self, *, near: bool = True):
        self.url = f"memory-store-{next(_numbers)}"
        self.near = near
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        """Put a new object from buffers; raise ObjectExistsError if the name is taken."""
        self.put_if_absent(name, b"".join(body))

    def put_if_absent(self, name: str, body: bytes) -> None:
        """Put an object; raise ObjectExistsError if the name is taken."""
        check_name(name)
        with self._lock:
            if name in self.objects:
                raise ObjectExistsError("the object exists already", key=name)
            self.objects[name] = bytes(body)

    def replace(self, name: str, body: bytes) -> None:
        """Put or overwrite an object."""
        check_name(name)
        self.objects[name] = bytes(body)

    def get(self, name: str, max_bytes: int) -> bytes:
        """Return an object's bytes; raise IntegrityError if there are more than `max_bytes`."""
        check_name(name)
        data = self.objects.get(name)
        if data is None:
            raise ObjectNotFoundError("no such object", key=name)
        if len(data) > max_bytes:
            raise IntegrityError(f"the object has more than {max_bytes} bytes", key=name)
        return data

    def read(self, name: str, begin: int, into: memoryview) -> None:
        """Fill a buffer from the object's bytes at `begin`; raise IntegrityError if it ends early."""
        data = self.get(name, 1 << 62)
        if begin + into.nbytes > len(data):
            raise IntegrityError(f"the object ends at byte {len(data)}", key=name)
        into[:] = data[begin : begin + into.nbytes]

    def size(self, name: str) -> int:
        """Return an object's size in bytes."""
        return len(self.get(name, 1 << 62))

    def adopt(self, source: Store, name: str, size_bytes: int) -> bool:
        """Return False: every copy passes through the process."""
        return False

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        """List the names that begin with `prefix`, in order; raise ConfigError for an invalid prefix."""
        base_of(prefix)
        return sorted([name for name in [*self.objects] if name.startswith(prefix)])[:limit]

    def delete(self, name: str) -> None:
        """Delete an object; do not raise if it is missing."""
        check_name(name)
        self.objects.pop(name, None)

    def drop_unfinished(self, dead: Callable[[str], bool]) -> None:
        """Do nothing: a write is one request here."""

    def assume_single_writer(self) -> None:
        """Do nothing: `put_if_absent` is atomic."""

    def keep_room(self) -> None:
        """Do nothing: there is always room."""


@dataclass(eq=False, kw_only=True)
class FaultRule:
    """A rule of a FaultyStore: which requests meet which fate; `FaultyStore.on` makes one.

    `hits` counts these requests; `reached` is set when the first one comes; setting `until` releases held requests.
    """

    fate: Fate
    verb: str
    name: str
    skip: int
    times: int | None
    hits: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    until: threading.Event = field(default_factory=threading.Event)

    def strikes(self, verb: str, name: str) -> bool:
        """Return True if this rule applies to a request, and count it."""
        meant = (not self.verb or verb in self.verb.split()) and re.search(self.name, name) is not None
        if not meant or self.hits == self.times:
            return False
        self.skip -= 1
        self.hits += self.skip < 0
        return self.skip < 0


class FaultyStore(WrappedStore):
    """A store that refuses, loses, tears, delays or repeats requests to `inner`, as its rules say.

    The fates:

    * "refused": nothing is done, and an error says so. "unanswered": the request is done, and the answer is lost.
    * "exists": the request is done, but the sender's second try gets the answer that the name is taken.
    * "late": an error; the request is done when `deliver` is called. "twice": it is done now, and again by `deliver`.
    * "torn": an error, and a part of the bytes is stored. "flipped": a read returns one wrong bit.
    * "done": the request is served normally; it may still be held.

    `log` has the (verb, name) of every request, in order. The verbs are put, put_if_absent, replace, delete, get, read,
    size and names.
    """

    def __init__(self, inner: Store):
        super().__init__(inner)
        self.log: list[tuple[str, str]] = []
        self._rules: tuple[FaultRule, ...] = ()
        self._late: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def on(
        self,
        fate: Fate,
        *,
        verb: str = "",
        name: str = "",
        skip: int = 0,
        times: int | None = None,
        held: bool = False,
    ) -> FaultRule:
        """Add a rule; of several that match, the first one strikes.

        `verb` is one or more verbs, separated by spaces; `name` is a pattern. The first `skip` matching requests pass;
        then at most `times` requests meet the fate. If `held`, these requests first wait for the rule's `until`.
        """
        rule = FaultRule(fate=fate, verb=verb, name=name, skip=skip, times=times)
        if not held:
            rule.until.set()
        self._rules = (*self._rules, rule)
        return rule

    def off(self, *rules: FaultRule) -> None:
        """Remove these rules, or all rules if none is given."""
        self._rules = tuple(rule for rule in self._rules if rules and rule not in rules)

    def deliver(self) -> None:
        """Deliver the late requests, and repeat those that come twice."""
        late, self._late = self._late, []
        for arrive in late:
            arrive()

    def fate_of(self, verb: str, name: str) -> Fate:
        """Return the fate of a request, after waiting as long as its rule holds it; a subclass may override this."""
        with self._lock:
            self.log.append((verb, name))
            rule = next((rule for rule in self._rules if rule.strikes(verb, name)), None)
        if rule is None:
            return "done"
        rule.reached.set()
        rule.until.wait()
        return rule.fate

    def later(self, arrive: Callable[[], None]) -> None:
        """Keep a request until `deliver` is called."""
        self._late.append(arrive)

    def part_of(self, body: bytes) -> bytes:
        """Return the half of the bytes that a torn write leaves."""
        return body[: len(body) // 2]

    def get(self, name: str, max_bytes: int) -> bytes:
        flipped = self._ask("get", name)
        data = self.inner.get(name, max_bytes)
        return _flipped(data) if flipped else data

    def read(self, name: str, begin: int, into: memoryview) -> None:
        flipped = self._ask("read", name)
        self.inner.read(name, begin, into)
        if flipped:
            into[:] = _flipped(bytes(into))

    def size(self, name: str) -> int:
        self._ask("size", name)
        return self.inner.size(name)

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        self._ask("names", prefix)
        return self.inner.names(prefix, limit)

    def adopt(self, source: Store, name: str, size_bytes: int) -> bool:
        """Return False: every copy is a request."""
        return False

    def put(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        data = b"".join(body)  # Training may change the buffers after the call.
        self._change("put", name, lambda part: self.inner.put(name, [part]), data)

    def put_if_absent(self, name: str, body: bytes) -> None:
        self._change("put_if_absent", name, partial(self.inner.put_if_absent, name), body)

    def replace(self, name: str, body: bytes) -> None:
        self._change("replace", name, partial(self.inner.replace, name), body)

    def delete(self, name: str) -> None:
        self._change("delete", name, lambda _: self.inner.delete(name), b"")

    def _ask(self, verb: str, name: str) -> bool:
        fate = self.fate_of(verb, name)
        if fate not in ("done", "flipped"):
            raise InjectedError("the store is overloaded", key=name)
        return fate == "flipped"

    def _change(self, verb: str, name: str, effect: Callable[[bytes], None], body: bytes) -> None:
        fate = self.fate_of(verb, name)
        if fate in ("late", "twice"):
            self.later(lambda: _tried(effect, body))
        if fate in ("done", "twice", "flipped"):
            effect(body)
            return
        if fate in ("unanswered", "exists"):
            _tried(effect, body)
        if fate == "exists":
            raise ObjectExistsError("the object exists already", key=name)
        if fate == "torn":
            _tried(effect, self.part_of(body))
        failure = InjectedError(f"no answer from the store ({fate})", key=name)
        failure.refused = fate == "refused"
        raise failure


def _tried(effect: Callable[[bytes], None], body: bytes) -> None:
    with suppress(ObjectExistsError):
        effect(body)


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data
