"""The ledger in use: read the newest entry, append the next one, and know the outcome of the append.

An append reads the entry back, whatever the store answered, and compares the nonce. Ours: done. Another valid entry:
try the next number, unless the directory has another owner. No entry: send the same bytes again. Unreadable: unknown.

A damaged newest entry is skipped, and objects that it may have named are spared: `append` does that, for every event.
An entry that this process had read before it was damaged is not skipped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tasks.errors import (
    CheckpointNotFoundError,
    CommitUncertainError,
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
from ckpt_tasks.format.ledger import MAX_ENTRY_BYTES, Entry, State
from ckpt_tasks.format.live import cut
from ckpt_tasks.format.manifest import FORMAT_VERSION, check_version
from ckpt_tasks.format.records import Owner
from ckpt_tasks.ledger.fencing import check_owner
from ckpt_tasks.ledger.segments import Segments
from ckpt_tasks.storage.port import Store
from ckpt_tasks.storage.probe import prove
from ckpt_tasks.storage.retrying import read_good
from ckpt_tasks.system import now_iso, system

__all__ = ["Head", "History"]

_SAME_NUMBER_TRIES = 5
_NEWEST = 16  # names in the first list; a second one asks for all
_NUMBERS_TRIED = 64  # lost to other writers; far more than happen by chance, since others wait
_LONGEST_WAIT_S = 30.0
_LOOKED_AT = 1000  # names that are searched for runs below a wrong directory
_NAMED = 5
_FOLLOWED = 8  # entries read one by one before names are listed
_LATE = "which is there: it is older than the last write. Use a store that lists at once what was written."

_log = logging.getLogger("ckpt_tasks")


@dataclass(frozen=True)
class Head:
    """The newest state of a run: `entry` is None before the first; `damaged` names entries that were skipped."""

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
        """The highest owner epoch that a damaged entry may name: each damaged entry may be that of a new owner."""
        epoch = self.state.owner.epoch if self.state.owner else 0
        damaged_epoch = min(epoch + len(self.damaged), MAX_EPOCH) if self.damaged else 0
        return max(self.state.spared_epochs, damaged_epoch)


class History:
    """Read and extend the ledger of one run directory."""

    def __init__(self, store: Store):
        self.store = store
        self._segments = Segments(store)
        self._known: Head | None = None  # the newest entry read by this process, with no damaged one above it
        self._warned: tuple[str, ...] = ()

    def create(self, run_key: str, *, single_writer: bool = False) -> None:
        """Write the run directory's format.json if it is missing.

        A server is tested first, once for each endpoint through which the directory is reached. Raises ConfigError if
        it cannot do what commits need; with `single_writer` put-if-absent is not needed.
        """
        body = self._format()
        if body is None:
            new = {"version": FORMAT_VERSION, "run_key": run_key, "created_at": now_iso()}
            self._put_format(self._proved(new, single_writer))
        elif not body and self.store.endpoint is not None:
            self._proved({}, single_writer)  # the damaged file may have said that the store has no put-if-absent
        elif body.get("run_key") == run_key and body.get("endpoint") != self.store.endpoint:
            self.store.replace(FORMAT_NAME, self._proved(body, bool(body.get("single_writer"))))

    def check(self, run_key: str | None) -> str | None:
        """Return the run's key, None if format.json is damaged (every manifest holds the key as well).

        Raises CheckpointNotFoundError if there is no run, RunMismatchError if it is another run, and
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
        key: str = body["run_key"]
        if run_key is not None and key != run_key:
            raise RunMismatchError(
                f"{self.store.url} holds the run {key!r}, not {run_key!r}",
                hint="Use another directory, or the run's own key.",
            )
        if body.get("single_writer") is True:
            self.store.assume_single_writer()
        return key

    def _runs_below(self) -> str:
        """Return a sentence that names some runs inside this directory; "" if there is none."""
        with suppress(StoreError):
            names = self.store.names("", limit=_LOOKED_AT)
            runs = sorted({name.partition("/")[0] for name in names if name.endswith(f"/{FORMAT_NAME}")})
            return f" There are runs in it: {', '.join(runs[:_NAMED])}." if runs else ""
        return ""

    def _format(self) -> dict[str, Any] | None:
        """Read format.json: None if there is none, {} if it is damaged."""
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
                return  # another process has written it meanwhile
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
        """Read the newest good entry; torn and foreign entries do not count, and a warning names them.

        Numbers are dense: on a local disk, a reader of entry n just looks for n + 1; a list of 6,000 names takes 5 ms.
        A server lists the newest few as fast as that, and might cache the answer that n + 1 is missing.
        """
        known = self._known
        return self._truth((self.store.near and known and self._followed(known)) or self._listed(known), known)

    def _truth(self, head: Head, before: Head | None) -> Head:
        """Prefer what this process has read before, even if it has been damaged since; warn of damage.

        `before` is what it knew before it read `head`: another thread may know more by now.
        """
        known = self._known
        if head.damaged and known and known.entry and (head.entry is None or head.entry.n < known.entry.n):
            above = tuple(name for name in head.damaged if (parse_ledger_name(name) or 0) > known.entry.n)
            head = replace(known, next_n=head.next_n, damaged=above)
        if before and not head.damaged and head.next_n < before.next_n and self._stands(before):
            head = self._followed(before) or before
            if self._warned != (_LATE,):
                self._warned = (_LATE,)
                _log.warning("%s: its listing lacks ledger entry %d, %s", self.store.url, before.next_n - 1, _LATE)
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
        """Read the entries after a known head, one by one; return None if a list is needed."""
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
        """Say whether a head's entry is still there, unchanged."""
        try:
            return self._read_entry(head.next_n - 1)[1] == head.digest
        except (IntegrityError, ObjectNotFoundError):
            return False

    def _listed(self, known: Head | None = None) -> Head:
        names = self.store.names(LEDGER_PREFIX, limit=_NEWEST)
        numbered = _numbered(names)
        if known and known.entry and not self.store.near and numbered and max(numbered)[0] == known.entry.n:
            return known  # an entry never changes: do not read it again
        newest = self._newest(numbered)
        if newest is None and len(names) == _NEWEST:  # all are damaged or foreign: look at older ones as well
            numbered = _numbered(self.store.names(LEDGER_PREFIX))
            newest = self._newest(numbered)
        next_n = max((n for n, _ in numbered), default=-1) + 1
        if newest is None:
            return Head(None, None, next_n, tuple(name for _, name in numbered))
        entry, digest, damaged = newest
        return Head(entry, digest, next_n, damaged)

    def read_entry(self, n: int) -> tuple[Entry, str]:
        """Read entry n with its digest; raise ObjectNotFoundError, or IntegrityError if it is torn or foreign."""
        return read_good(self.store, lambda: self._read_entry(n), listed=True)

    def good_entry(self, n: int) -> tuple[Entry, str] | None:
        """Read entry n with its digest; return None if it is damaged or missing, which `ckpt verify` reports."""
        try:
            return self.read_entry(n)
        except (IntegrityError, ObjectNotFoundError):
            return None

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

    def append(self, event: Mapping[str, Any], change: Callable[[State, int], State], *, owner: Owner | None) -> Entry:
        """Append one event; `change(state, n)` returns the state after entry n.

        Give `owner` for an event that only the owner may write. Raises FencedError if the directory has another owner,
        CommitUncertainError if the outcome is unknown, StoreError if nothing was written, and what `change` raises.
        """
        # A list cannot show that a remote store was emptied and filled anew: so the entry is read again here.
        nonce, known = system().token_hex(16), self._known
        head = self.head() if self.store.near else self._truth(self._listed(), known)
        for lost in range(_NUMBERS_TRIED):
            if owner is not None:
                check_owner(head.state.owner, owner)
            entry, began_s = _next(head, nonce, event, change(head.state, head.next_n)), system().monotonic()
            if self._read_back(entry):
                break
            if owner is None:
                # The owner goes first and retries at once. Others wait, longer with each lost number.
                most_s = min(_LONGEST_WAIT_S, (system().monotonic() - began_s) * 2 ** (lost + 1))
                system().sleep(system().uniform(0, most_s))
            head = self._past(head, entry.n)
            if head.entry is not None and head.entry.nonce == nonce:
                entry = head.entry  # ours after all: the read before got wrong bytes
                break
        else:
            raise StoreError(f"{_NUMBERS_TRIED} ledger numbers in a row went to other writers", key=LEDGER_PREFIX)
        _log.debug("Entry %d stands: %s (%s)", entry.n, event["kind"], nonce)
        return entry

    def _past(self, head: Head, n: int) -> Head:
        """Re-read the head after losing number n to another writer, even if a listing is stale."""
        fresh = self.head()
        if fresh.next_n > n:
            return fresh
        if (good := self.good_entry(n)) is None:
            return Head(head.entry, head.digest, n + 1, (*head.damaged, ledger_name(n)))
        return Head(*good, n + 1, fresh.damaged)

    def _is_mine(self, name: str, data: bytes) -> bool:
        """Say whether the entry under this name is ours; raise IntegrityError if it is not a good entry at all."""
        stored = self.store.get(name, MAX_ENTRY_BYTES)
        if stored != data:
            Entry.from_bytes(stored, name)
        return stored == data

    def _read_back(self, entry: Entry) -> bool:
        """Put an entry until its outcome is known: True if it is ours; raise CommitUncertainError or StoreError."""
        name, (data, digest) = ledger_name(entry.n), entry.to_bytes()
        self._segments.put(entry.segments)
        failure: StoreError | None = None
        refused = True  # every try, so far
        for _ in range(_SAME_NUMBER_TRIES):
            try:
                self.store.put_if_absent(name, data)
            except StoreError as error:
                failure, refused = error, refused and error.refused
            else:
                refused = False
            try:
                stands = read_good(self.store, lambda: self._is_mine(name, data))
            except ObjectNotFoundError:
                if failure is not None and failure.refused:
                    raise failure from None  # the store has refused every try
                if failure is not None and not isinstance(failure, ObjectExistsError):
                    continue
                raise CommitUncertainError("the ledger entry was taken and cannot be seen", key=name) from failure
            except IntegrityError:
                return False  # something foreign has the name: use the next number
            except StoreError as error:
                if failure is not None and refused:
                    raise failure from None
                raise CommitUncertainError(
                    f"whether the commit landed cannot be known: its ledger entry cannot be read back ({error})",
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
            if (good := self.good_entry(n)) is not None:
                return *good, tuple(damaged)
            damaged.append(name)
        return None


def _next(head: Head, nonce: str, event: Mapping[str, Any], state: State) -> Entry:
    """Make the entry that follows a head; from now on, spare what damaged entries above it may have named."""
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
