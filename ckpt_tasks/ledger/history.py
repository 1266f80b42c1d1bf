"""The ledger in use: read the newest entry, append the next one, and know which outcome that had.

An append never believes the store's answer: it reads the entry back and compares the nonce. My nonce means
done; another valid entry means look at it and try the next number, unless the directory changed hands; nothing there
means send the same bytes again; unreadable means that the outcome is unknown.

A damaged newest entry is passed over, and what it may have named is spared: `append` alone does that, for every event.
An entry that this process has read before it was damaged is not passed over.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ckpt_tasks.errors import (
    CheckpointNotFoundError,
    CommitUncertainError,
    FencedError,
    IntegrityError,
    ObjectExistsError,
    ObjectNotFoundError,
    RunMismatchError,
    StoreError,
)
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.keys import (
    FORMAT_NAME,
    LEDGER_PREFIX,
    MANIFEST_NAME,
    MAX_EPOCH,
    ledger_name,
    parse_attempt,
    parse_ledger_name,
)
from ckpt_tasks.format.ledger import MAX_ENTRY_BYTES, Entry, Owner, State
from ckpt_tasks.format.live import cut
from ckpt_tasks.format.manifest import FORMAT_VERSION, check_version
from ckpt_tasks.ledger.segments import Segments
from ckpt_tasks.storage.port import Store
from ckpt_tasks.storage.probe import prove
from ckpt_tasks.storage.retrying import read_good

__all__ = ["Head", "History", "now_iso"]

_SAME_NUMBER_TRIES = 5
_NEWEST = 16  # names that are looked at before all of them are
_NUMBERS_TRIED = 64  # lost to others' entries; far more than can happen by chance where others wait
_LONGEST_WAIT_S = 30.0
_LOOKED_AT = 1000  # names, for runs below a directory that is none
_NAMED = 5
_FOLLOWED = 8  # entries read one by one before all names are looked at

_log = logging.getLogger("ckpt_tasks")
_dice = random.SystemRandom()  # Python's generator belongs to the training, and is saved with it


@dataclass(frozen=True)
class Head:
    """The newest state of a run: `entry` is None before the first; `damaged` names entries that were passed over."""

    entry: Entry | None
    digest: str | None
    next_n: int
    damaged: tuple[str, ...]

    @property
    def state(self) -> State:
        """The state after the newest good entry."""
        return self.entry.state if self.entry else State()

    @property
    def spared_epochs(self) -> int:
        """Up to which owner epoch attempts may be named by a damaged entry: each may have been a new owner's."""
        epoch = self.state.owner.epoch if self.state.owner else 0
        damaged_epoch = min(epoch + len(self.damaged), MAX_EPOCH) if self.damaged else 0
        return max(self.state.spared_epochs, damaged_epoch)


class History:
    """Read and extend the ledger of one run directory."""

    def __init__(self, store: Store):
        self.store = store
        self._segments = Segments(store)
        self._known: Head | None = None  # the newest entry that was read here, with none damaged above it
        self._warned: tuple[str, ...] = ()

    def create(self, run_key: str, *, single_writer: bool = False) -> None:
        """Make the run directory's format.json unless it is there.

        A store that is a server is tried first, once for every endpoint that the directory is reached through. Raises
        ConfigError if it does not do what commits rest on; `single_writer` does without put-if-absent.
        """
        body = self._format()
        if body is None:
            new = {"version": FORMAT_VERSION, "run_key": run_key, "created_at": now_iso()}
            self._put_format(self._proved(new, single_writer))
        elif not body and self.store.endpoint is not None:
            self._proved({}, single_writer)  # what is damaged may have said that the store cannot put if absent
        elif body.get("run_key") == run_key and body.get("endpoint") != self.store.endpoint:
            self.store.replace(FORMAT_NAME, self._proved(body, bool(body.get("single_writer"))))

    def check(self, run_key: str | None) -> str | None:
        """Return the run's key, None if format.json is damaged (every manifest holds the key as well).

        Raises CheckpointNotFoundError if there is no run, RunMismatchError if it is another one's, and
        FormatVersionError if a newer version wrote it.
        """
        body = self._format()
        if body is None:
            raise CheckpointNotFoundError(
                f"{self.store.url} is not a run directory: it has no {FORMAT_NAME}",
                hint=f"Check the directory's name.{self._runs_below()}",
            )
        if not body:
            return None
        found: str = body["run_key"]
        if run_key is not None and found != run_key:
            raise RunMismatchError(
                f"{self.store.url} holds the run {found!r}, not {run_key!r}",
                hint="Use another directory, or the run's own key.",
            )
        if body.get("single_writer") is True:
            self.store.assume_single_writer()
        return found

    def _runs_below(self) -> str:
        """Name some runs whose directories lie in this one."""
        with suppress(StoreError):
            names = self.store.names("", limit=_LOOKED_AT)
            runs = sorted({name.partition("/")[0] for name in names if name.endswith(f"/{FORMAT_NAME}")})
            return f" There are runs in it: {', '.join(runs[:_NAMED])}." if runs else ""
        return ""

    def _format(self) -> dict[str, Any] | None:
        """Read format.json: None if there is none, empty where it is damaged."""
        try:
            return read_good(self.store, self._read_format)
        except ObjectNotFoundError:
            return None
        except IntegrityError:
            return {}

    def _read_format(self) -> dict[str, Any]:
        try:
            body: Any = json.loads(self.store.get(FORMAT_NAME, 1 << 20))
            if digest_hex(canonical_json({k: v for k, v in body.items() if k != "digest"})) != body["digest"]:
                raise IntegrityError("its bytes are not what was written", key=FORMAT_NAME)
            check_version(body["version"], FORMAT_NAME)
            return {**body, "run_key": str(body["run_key"])}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"it is malformed: {error!r:.200}", key=FORMAT_NAME) from error

    def _put_format(self, data: bytes) -> None:
        for left in reversed(range(_SAME_NUMBER_TRIES)):
            try:
                self.store.put_if_absent(FORMAT_NAME, data)
            except ObjectExistsError:
                return  # somebody else made it meanwhile
            except StoreError:
                if self._format() is not None:
                    return  # only the answer was lost
                if not left:
                    raise
            else:
                return

    def _proved(self, body: Mapping[str, Any], single_writer: bool) -> bytes:
        new = {key: value for key, value in body.items() if key != "digest"}
        new |= {"single_writer": single_writer}
        if single_writer:
            self.store.assume_single_writer()
        if self.store.endpoint is not None:
            new |= {"endpoint": self.store.endpoint, "proved": prove(self.store, single_writer=single_writer)}
        return canonical_json({**new, "digest": digest_hex(canonical_json(new))})

    def head(self) -> Head:
        """Read the newest good entry; torn and foreign ones count as "nothing happened", and a warning names them.

        Numbers are dense: on a local disk, a reader of entry n looks for n + 1 and needs no list, which takes 5 ms of
        6,000 names. A server lists the newest few as fast, and may remember that it was asked for what is not there.
        """
        known = self._known
        return self._truth((self.store.near and known and self._followed(known)) or self._listed(known))

    def _truth(self, head: Head) -> Head:
        """Go on from what this process has read, also where its bytes have been damaged since; warn of damage."""
        known = self._known
        if head.damaged and known and known.entry and (head.entry is None or head.entry.n < known.entry.n):
            above = tuple(name for name in head.damaged if (parse_ledger_name(name) or 0) > known.entry.n)
            head = replace(known, next_n=head.next_n, damaged=above)
        if not head.damaged:
            self._known = head if head.entry else None
        elif head.damaged != self._warned:
            self._warned = head.damaged
            self._warn(head)
        return head

    def _warn(self, head: Head) -> None:
        steps = {
            attempt.step
            for name in self.store.names("")
            if name.endswith(f"/{MANIFEST_NAME}") and not head.state.keeps(name) and not head.state.has_retired(name)
            if (attempt := parse_attempt(name)) is not None
        }
        _log.warning(
            "%s: the newest ledger entries cannot be read: %s. The run goes on from %s. %s. Their objects stay.",
            self.store.url,
            ", ".join(head.damaged),
            f"entry {head.entry.n}" if head.entry else "nothing",
            f"Checkpoints that only they may have listed: steps {', '.join(map(str, sorted(steps)))}"
            if steps
            else "No checkpoint is lost with them",
        )

    def _followed(self, head: Head) -> Head | None:
        """Go on from a state that was read before; None if the list must be asked."""
        known = head
        for _ in range(_FOLLOWED):
            try:
                entry, digest = self._read_entry(known.next_n)
            except ObjectNotFoundError:
                return known if known is not head or self._stands(head) else None
            except IntegrityError:
                return None
            known = Head(entry, digest, entry.n + 1, ())
        return None

    def _stands(self, head: Head) -> bool:
        """Say whether the entry of a state is still there, as it was."""
        try:
            return self._read_entry(head.next_n - 1)[1] == head.digest
        except (IntegrityError, ObjectNotFoundError):
            return False

    def _listed(self, known: Head | None = None) -> Head:
        names = self.store.names(LEDGER_PREFIX, limit=_NEWEST)
        numbered = _numbered(names)
        if known and known.entry and not self.store.near and numbered and max(numbered)[0] == known.entry.n:
            return known  # an entry never changes: what was read of it is not asked for again
        found = self._newest(numbered)
        if found is None and len(names) == _NEWEST:  # all damaged or foreign: look at the older ones as well
            numbered = _numbered(self.store.names(LEDGER_PREFIX))
            found = self._newest(numbered)
        next_n = max((n for n, _ in numbered), default=-1) + 1
        if found is None:
            return Head(None, None, next_n, tuple(name for _, name in numbered))
        entry, digest, damaged = found
        return Head(entry, digest, next_n, damaged)

    def read_entry(self, n: int) -> tuple[Entry, str]:
        """Read entry n with its digest; raise ObjectNotFoundError, or IntegrityError if it is torn or foreign."""
        return read_good(self.store, lambda: self._read_entry(n), listed=True)

    def _read_entry(self, n: int) -> tuple[Entry, str]:
        name = ledger_name(n)
        entry, digest = Entry.from_bytes(self.store.get(name, MAX_ENTRY_BYTES), name)
        if entry.n != n:
            raise IntegrityError(f"the entry says that it is number {entry.n}", key=name)
        if entry.segments:
            entry = entry.with_segments(self._segments.read(entry.segments))
            if any(checkpoint.n > n for checkpoint in entry.state.live):
                raise IntegrityError(f"a checkpoint of a later entry than number {n}", key=name)
        return entry, digest

    def append(
        self,
        event: Mapping[str, Any],
        change: Callable[[State, int], State],
        *,
        owner: Owner | None,
    ) -> Entry:
        """Append one event; `change` turns the state before entry n into the state after it.

        `owner` is the writer when the event is the owner's alone. Raises FencedError if the directory has another
        owner by now, CommitUncertainError if the outcome cannot be known, StoreError if nothing was written.
        """
        # A list alone does not tell where a store far away was emptied and filled anew: here the entry is read again.
        nonce, head = secrets.token_hex(16), self.head() if self.store.near else self._truth(self._listed())
        for lost in range(_NUMBERS_TRIED):
            if owner is not None:
                check_owner(head.state.owner, owner)
            entry, began_s = _next(head, nonce, event, change(head.state, head.next_n)), time.monotonic()
            if self._read_back(entry):
                return entry
            if owner is None:
                # The owner goes first: it tries again at once. Others wait, the longer the more there are of them.
                most_s = min(_LONGEST_WAIT_S, (time.monotonic() - began_s) * 2 ** (lost + 1))
                time.sleep(_dice.uniform(0, most_s))
            head = self._past(head, entry.n)
            if head.entry is not None and head.entry.nonce == nonce:
                return head.entry  # it stands: a moment ago it was read with wrong bytes
        raise StoreError(f"{_NUMBERS_TRIED} ledger numbers in a row went to other writers", key=LEDGER_PREFIX)

    def _past(self, head: Head, n: int) -> Head:
        """Read the newest state again, number n being another's: also where a stale listing does not show it."""
        fresh = self.head()
        if fresh.next_n > n:
            return fresh
        try:
            entry, digest = self.read_entry(n)
        except (IntegrityError, ObjectNotFoundError):
            return Head(head.entry, head.digest, n + 1, (*head.damaged, ledger_name(n)))
        return Head(entry, digest, n + 1, fresh.damaged)

    def _is_mine(self, name: str, data: bytes) -> bool:
        """Read a number back; raise IntegrityError if neither this entry nor another good one is there."""
        found = self.store.get(name, MAX_ENTRY_BYTES)
        if found != data:
            Entry.from_bytes(found, name)
        return found == data

    def _read_back(self, entry: Entry) -> bool:
        """Put an entry until its outcome is known: True when it stands, False when the number is another's."""
        name, (data, digest) = ledger_name(entry.n), entry.to_bytes()
        self._segments.put(entry.segments)
        failure: StoreError | None = None
        for _ in range(_SAME_NUMBER_TRIES):
            try:
                self.store.put_if_absent(name, data)
            except StoreError as error:
                failure = error
            try:
                stands = read_good(self.store, lambda: self._is_mine(name, data))
            except ObjectNotFoundError:
                if failure is not None and failure.refused:
                    raise failure from None  # it was asked for as long as makes sense, and said no each time
                if failure is not None and not isinstance(failure, ObjectExistsError):
                    continue
                raise CommitUncertainError("the ledger entry was taken and cannot be seen", key=name) from failure
            except IntegrityError:
                return False  # something foreign has the number: the next one is used
            except StoreError as error:
                raise CommitUncertainError(
                    "whether the commit landed cannot be known: its ledger entry cannot be read back",
                    key=name,
                    hint="All data is durable; start again, and the run goes on from what the ledger then says.",
                ) from error
            else:
                self._known = Head(entry, digest, entry.n + 1, ()) if stands else self._known
                return stands
        assert failure is not None
        raise failure

    def _newest(self, numbered: list[tuple[int, str]]) -> tuple[Entry, str, tuple[str, ...]] | None:
        damaged: list[str] = []
        for n, name in sorted(numbered, reverse=True):
            try:
                entry, digest = self.read_entry(n)
            except (IntegrityError, ObjectNotFoundError):
                damaged.append(name)
                continue
            return entry, digest, tuple(damaged)
        return None


def _next(head: Head, nonce: str, event: Mapping[str, Any], state: State) -> Entry:
    """Make the entry that follows a head; what damaged entries above it may have named is spared from now on."""
    return Entry(
        n=head.next_n,
        epoch=head.state.owner.epoch if head.state.owner else 0,
        nonce=nonce,
        previous=head.digest,
        at=now_iso(),
        event={**event, "damaged": [*head.damaged]} if head.damaged else event,
        state=state.sparing(head.spared_epochs),
        segments=cut(state.live, head.entry.segments if head.entry else ()),
    )


def _numbered(names: list[str]) -> list[tuple[int, str]]:
    return [(n, name) for name in names if (n := parse_ledger_name(name)) is not None]


def check_owner(found: Owner | None, mine: Owner) -> None:
    """Raise FencedError unless the directory is still this owner's."""
    if found is None or found.id != mine.id or found.epoch != mine.epoch:
        who = "an owner that cannot be read"
        if found is not None:
            same = (found.host, found.pid, found.process_start) == (mine.host, mine.pid, mine.process_start)
            who = "another Checkpointer of this process" if same else f"process {found.pid} on {found.host}"
            who += f", owner epoch {found.epoch}"
        raise FencedError(
            f"the run directory has been taken over by {who}",
            hint="This process must stop: what it trained since its last commit is not part of the run.",
        )


def now_iso() -> str:
    """Return the time for people to read; no decision is made from it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
