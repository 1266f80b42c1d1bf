"""Read the newest entry of the ledger, append the next one, and know the outcome of the append.

An append reads the entry back, whatever the store answered, and compares the nonce. If the entry is ours, the append is
done. If another entry or a damaged object has the number, the append tries the next number, unless the directory has
another owner. If the entry is missing, the append sends the same bytes again. If the store fails to return the entry,
the outcome is unknown.

`append` skips a damaged newest entry and spares the objects that the entry may have named, for every event. It does not
skip an entry that this process read before the damage.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ckpt_tasks.errors import (
    CommitUncertainError,
    IntegrityError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
)
from ckpt_tasks.format.keys import (
    LEDGER_PREFIX,
    MANIFEST_NAME,
    MAX_EPOCH,
    ledger_name,
    parse_attempt,
    parse_ledger_name,
)
from ckpt_tasks.format.ledger import MAX_ENTRY_BYTES, Entry, State
from ckpt_tasks.format.live import cut
from ckpt_tasks.format.records import Checkpoint, Owner
from ckpt_tasks.process import in_threads
from ckpt_tasks.run.ledger.fencing import check_owner
from ckpt_tasks.run.ledger.run_format import RunFormat
from ckpt_tasks.run.ledger.segments import Segments
from ckpt_tasks.storage.port import Store
from ckpt_tasks.storage.retrying import read_good
from ckpt_tasks.system import now_iso, system

SYNCED = "synced"  # The event that a finished copy of a run writes into the target's ledger.

_SAME_NUMBER_TRIES = 5
_LOOKED_AT = 8  # An overview reads this many of an entry's live checkpoints.
_NEWEST = 16  # List this many names at first; if that is not enough, list all.
# Give up after losing this many numbers to other writers. Chance alone never costs so many, since other writers wait.
_NUMBERS_TRIED = 64
_LONGEST_WAIT_S = 30.0
_FOLLOWED = 8  # Read up to this many entries one by one, then list names.
_FEWEST, _MOST = 4, 64  # `newest_first` reads this many entries at once: few at first, then more.
_LISTED = 16  # `newest_first` lists this many names, then eight times as many.
_THREADS = 8
_LATE = "which is there: it is older than the last write. Use a store that lists at once what was written."

_log = logging.getLogger("ckpt_tasks")


@dataclass(frozen=True)
class Head:
    """The newest state of a run: `entry` is None before the first entry; `damaged` names entries that were skipped."""

    entry: Entry | None
    digest: str | None
    next_n: int
    damaged: tuple[str, ...]

    @property
    def state(self) -> State:
        """The state of the run after the newest good entry."""
        return self.entry.state if self.entry else State()

    @property
    def spared_epochs(self) -> int:
        """The highest owner epoch that a damaged entry may name: each damaged entry may have brought a new owner."""
        epoch = self.state.owner.epoch if self.state.owner else 0
        damaged_epoch = min(epoch + len(self.damaged), MAX_EPOCH) if self.damaged else 0
        return max(self.state.spared_epochs, damaged_epoch)


class History(RunFormat):
    """Reads and extends the ledger of one run directory.

    If not `whole`, entries are read with their newest live checkpoints only, which is enough for an overview.
    """

    def __init__(self, store: Store, *, whole: bool = True):
        super().__init__(store)
        self._whole = whole
        self._segments = Segments(store)
        self._known: Head | None = None  # The newest entry read by this process, if no newer one is damaged.
        self._seen = False  # True if the last read found no damage: then `_known` is the newest entry.
        self._looked_s = -math.inf
        self._has_put = False  # True once this process has put an entry that it parsed again.
        self._warned: tuple[str, ...] = ()

    def head(self) -> Head:
        """Read the newest good entry; skip torn and foreign entries, and warn of them by name.

        Numbers are dense. On a local disk, a process that knows entry n only looks for n + 1, since listing 6,000 names
        takes 5 ms. On a server it lists the newest names: this is as fast, and a server might cache that n + 1 is
        missing.
        """
        known = self._known
        return self._truth((self.store.near and known and self._followed(known)) or self._listed(known), known)

    def head_within(self, seconds: float) -> Head:
        """Return the head that this process read or put at most `seconds` ago; otherwise read the head.

        On a disk, always read the head.
        """
        fresh = self._seen and not self.store.near and system().monotonic() - self._looked_s < seconds
        return self._known if fresh and self._known else self.head()

    def _truth(self, head: Head, before: Head | None) -> Head:
        """Prefer a newer entry that this process has read, even if the entry is damaged by now; warn of damage.

        `before`: the head that this process knew before it read `head`; another thread may have read a newer one
        meanwhile.
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
        elif head.damaged != self._warned and self._whole:
            self._warned = head.damaged
            self._warn(head)
        self._seen, self._looked_s = not head.damaged, system().monotonic()
        return head

    def _warn(self, head: Head) -> None:
        steps = {
            attempt.step
            for name in self.store.names("")
            if name.endswith(f"/{MANIFEST_NAME}") and not head.state.keeps(name) and not head.state.has_retired(name)
            if (attempt := parse_attempt(name)) is not None
        }
        _log.warning(
            "%s: the newest ledger entries cannot be read: %s. The run resumes from %s. %s. Their objects stay.",
            self.store.url,
            ", ".join(head.damaged),
            f"entry {head.entry.n}" if head.entry else "nothing",
            f"Checkpoints that only they may have listed: steps {', '.join(map(str, sorted(steps)))}"
            if steps
            else "No checkpoint is lost with them",
        )

    def _followed(self, head: Head) -> Head | None:
        """Read the entries after a known head, one by one; return None if names must be listed."""
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
        """Return True if a head's entry still exists, byte for byte."""
        if head.entry is None or head.digest is None:
            return False
        try:
            return head.entry.is_in(self.store.get(ledger_name(head.next_n - 1), MAX_ENTRY_BYTES), head.digest)
        except (IntegrityError, ObjectNotFoundError):
            return False

    def _listed(self, known: Head | None = None) -> Head:
        names = self.store.names(LEDGER_PREFIX, limit=_NEWEST)
        numbered = _numbered(names)
        if known and known.entry and not self.store.near and numbered and max(numbered)[0] == known.entry.n:
            return known  # An entry never changes: do not read it again.
        newest = self._newest(numbered)
        if newest is None and len(names) == _NEWEST:  # All of them are damaged or foreign: look at older ones as well.
            numbered = _numbered(self.store.names(LEDGER_PREFIX))
            newest = self._newest(numbered)
        next_n = max((n for n, _ in numbered), default=-1) + 1
        if newest is None:
            return Head(None, None, next_n, tuple(name for _, name in numbered))
        entry, digest, damaged = newest
        return Head(entry, digest, next_n, damaged)

    def read_entry(self, n: int) -> tuple[Entry, str]:
        """Read entry n and its digest; raise ObjectNotFoundError, or IntegrityError if it is torn or foreign."""
        return read_good(self.store, lambda: self._read_entry(n), listed=True)

    def good_entry(self, n: int) -> tuple[Entry, str] | None:
        """Read entry n and its digest; return None if it is damaged or missing, which `ckpt verify` reports."""
        try:
            return self.read_entry(n)
        except (IntegrityError, ObjectNotFoundError):
            return None

    def _read_entry(self, n: int) -> tuple[Entry, str]:
        name = ledger_name(n)
        newest = None if self._whole else _LOOKED_AT
        entry, digest = Entry.from_bytes(self.store.get(name, MAX_ENTRY_BYTES), name, newest)
        if entry.n != n:
            raise IntegrityError(f"the entry says that it is number {entry.n}", key=name)
        if entry.segments and self._whole:
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
        standing: Checkpoint | None = None,
    ) -> Entry:
        """Append one event; `change(state, n)` returns the state after entry n.

        `owner`: only this owner may write the event. `standing`: the checkpoint that the newest entry committed, if
        every byte of it has just been read. Raises FencedError if the directory has another owner, CommitUncertainError
        if the outcome is unknown, StoreError if nothing was written, and errors of `change`.
        """
        nonce, head = system().token_hex(16), self._to_follow(owner, standing)
        for lost in range(_NUMBERS_TRIED):
            if owner is not None:
                check_owner(head.state.owner, owner)
            entry, began_s = _next(head, nonce, event, change(head.state, head.next_n)), system().monotonic()
            if self._read_back(entry):
                break
            if owner is None:
                # The owner retries at once, so that it wins. Other writers wait, longer with each number lost.
                most_s = min(_LONGEST_WAIT_S, (system().monotonic() - began_s) * 2 ** (lost + 1))
                system().sleep(system().uniform(0, most_s))
            head = self._past(head, entry.n)
            if head.entry is not None and head.entry.nonce == nonce:
                entry = head.entry  # The entry is ours after all: the earlier read got wrong bytes.
                break
        else:
            raise StoreError(f"{_NUMBERS_TRIED} ledger numbers in a row went to other writers", key=LEDGER_PREFIX)
        _log.debug("Entry %d stands: %s (%s)", entry.n, event["kind"], nonce)
        return entry

    def _to_follow(self, owner: Owner | None, standing: Checkpoint | None) -> Head:
        """Return the head that the new entry follows.

        A server refuses the next number if any writer has used it: so the owner, which writes nearly all entries, need
        not list them (decision 0084). But the directory may have been emptied and filled again up to a lower number: so
        check that the entry that the owner knows still exists.
        """
        known = self._known
        if self.store.near:
            return self.head()
        if owner is None or known is None or not self._seen:
            return self._truth(self._listed(), known)
        stands = (standing is not None and standing.n == known.next_n - 1) or self._stands(known)
        return known if stands else self._truth(self._listed(), known)

    def _past(self, head: Head, n: int) -> Head:
        """Read the head again after number n went to another writer, even if a listing is stale."""
        fresh = self.head()
        if fresh.next_n > n:
            return fresh
        if (good := self.good_entry(n)) is None:
            return Head(head.entry, head.digest, n + 1, (*head.damaged, ledger_name(n)))
        return Head(*good, n + 1, fresh.damaged)

    def _is_mine(self, name: str, data: bytes) -> bool:
        """Return True if the entry under this name is ours; raise IntegrityError if it is damaged or foreign."""
        stored = self.store.get(name, MAX_ENTRY_BYTES)
        if stored != data:
            Entry.from_bytes(stored, name)
        return stored == data

    def _read_back(self, entry: Entry) -> bool:
        """Put an entry, and return True if it is ours; raise CommitUncertainError if that is unknown, or StoreError."""
        # A commit adds one checkpoint to a state that was checked; all other events are rare.
        parse = not self._has_put or entry.event["kind"] != "commit"
        name, (data, digest) = ledger_name(entry.n), entry.to_bytes(parse=parse)
        self._segments.put(entry.segments)
        failure: StoreError | None = None
        refused = True  # True while the store has refused every try.
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
                    raise failure from None  # The store has refused every try.
                if failure is not None and not isinstance(failure, ObjectExistsError):
                    continue
                raise CommitUncertainError("the ledger entry was taken and cannot be seen", key=name) from failure
            except IntegrityError:
                return False  # A foreign object has the name: use the next number.
            except StoreError as error:
                if failure is not None and refused:
                    raise failure from None
                raise CommitUncertainError(
                    f"whether the commit landed cannot be known: its ledger entry cannot be read back ({error})",
                    key=name,
                    hint="All data is durable; start again, and the run resumes from what the ledger then says.",
                ) from error
            else:
                if stands:
                    self._known, self._seen = Head(entry, digest, entry.n + 1, ()), True
                    self._has_put = True
                    self._looked_s = system().monotonic()
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
    """Make the entry that follows a head; if damaged entries follow the head, spare the objects that they may name."""
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


def newest_first(history: History, *, since: int = 0) -> Iterator[tuple[Entry, str]]:
    """Yield (entry, digest) from the newest entry down to number `since`; skip damaged ones.

    Reads a few entries at first and then more at a time, so that a caller that stops early has read few. Requests only
    entries that exist, even if the newest number is absurdly high.
    """
    numbers, batch_size = _existing(history, since), _FEWEST
    while batch := [*islice(numbers, batch_size)]:
        entries = in_threads(history.good_entry, batch, _THREADS, "ckpt-ledger")
        yield from (entry for entry in entries if entry is not None)
        batch_size = min(2 * batch_size, _MOST)


def _existing(history: History, since: int) -> Iterator[int]:
    """Yield the numbers of existing entries, newest first."""
    limit, last = _LISTED, -1
    while True:
        names = history.store.names(LEDGER_PREFIX, limit=limit)
        for name in names:
            n = parse_ledger_name(name)
            if n is None or 0 <= last <= n:
                continue  # A foreign name, or one that was listed before.
            if n < since:
                return
            last = n
            yield n
        if len(names) < limit:
            return
        limit *= 8
