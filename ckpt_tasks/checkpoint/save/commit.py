"""The committer's half of a save: owner → tiling → sizes → index, manifest → entry → prune; it sees no tensor.

Invariants (MUST: breaking one loses data)

1. Every object is durable before the manifest is written, and the manifest before the ledger entry is put.
2. The entry is put only when every expected rank has delivered its part, the regions of every tensor tile its box
   exactly, and every object has its expected size.
3. Every object's name holds the attempt's own nonce: no save ever writes into another save's objects.
4. Any failure of any writer is raised, and then nothing is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from ckpt_tasks.checkpoint.save.parts import RankPart, Saving
from ckpt_tasks.checkpoint.save.prepared import PreparedCheckpoint, prepare_checkpoint
from ckpt_tasks.checkpoint.save.pruning import Pruner
from ckpt_tasks.checkpoint.save.tenure import Line
from ckpt_tasks.errors import CkptError, ConfigError, IntegrityError, ObjectNotFoundError, StateError, StoreError
from ckpt_tasks.format.keys import MANIFEST_NAME, Attempt, attempt_prefix
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.manifest import ObjectRecord
from ckpt_tasks.format.records import Owner
from ckpt_tasks.run.ledger.fencing import check_owner
from ckpt_tasks.run.ledger.history import Head, History
from ckpt_tasks.run.ledger.ownership import Heartbeat, release
from ckpt_tasks.storage.port import Store
from ckpt_tasks.system import system


class Commit(NamedTuple):
    """What a commit has put: its ledger entry, and the checkpoint."""

    entry: Entry
    prepared: PreparedCheckpoint


class Committer:
    """Commits the parts that ranks have written, for one owner of the run directory."""

    def __init__(
        self,
        history: History,
        owner: Owner,
        pruner: Pruner,
        line: Line,
        *,
        owner_timeout_s: float,
    ):
        self.owner = owner
        self._line = line
        self._owner_timeout_s = owner_timeout_s
        self._beat_s = Heartbeat.every_s(owner_timeout_s)
        self.history = history
        self._pruner = pruner
        # The attempt whose entry this process began to put: the entry may exist, even after an error.
        self._entered: Attempt | None = None

    def check_line(self) -> None:
        """Raise ConfigError if other processes have committed checkpoints that this one has not restored.

        Otherwise the saves of this process would begin another line. One check per ownership suffices, because only the
        owner commits.
        """
        state = self.history.head().state
        check_owner(state.owner, self.owner)
        if any(checkpoint.n > self._line.known_n for checkpoint in state.live):
            raise ConfigError(
                f"{self.history.store.url} holds checkpoints up to step {max(c.step for c in state.live)}",
                hint="Call restore() first, or use another directory.",
            )

    def hold_base(self) -> None:
        """Protect all checkpoints whose objects the next save may reuse from retirement, until the save ends."""
        with self._pruner.retiring:
            self._pruner.base = self._line.digest

    def admit(self) -> tuple[Head, State]:
        """Return the ledger's head and state for the next commit; raise FencedError if another process is the owner.

        On a server, the head may be as old as one heartbeat interval, because the heartbeat checks the owner, too.
        """
        head = self.history.head_within(self._beat_s)
        state = head.state.sparing(head.spared_epochs)
        check_owner(state.owner, self.owner)
        return head, state

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Raise FencedError instead of ObjectNotFoundError if another process owns the directory.

        The new owner deletes objects of this process that are not committed, so a missing object can mean a lost run.
        """
        try:
            yield
        except ObjectNotFoundError:
            with suppress(StoreError):
                check_owner(self.history.head().state.owner, self.owner)
            raise

    def abandon(self, attempt: Attempt) -> None:
        """Delete the objects of a failed attempt, unless its ledger entry may exist.

        Raises FencedError if another process owns the directory, which explains why the attempt failed.
        """
        self._pruner.base = None
        if self._entered == attempt:
            return
        with suppress(StoreError):  # A later owner deletes what remains.
            check_owner(self.history.head().state.owner, self.owner)
        discard(self.history.store, attempt)

    def commit(
        self,
        admitted: tuple[Head, State],
        saving: Saving,
        parts: Sequence[RankPart],
        *,
        observed: Mapping[str, object],
        sealed: PreparedCheckpoint | None = None,
        began_s: float | None = None,
        cost_s: float | None = None,
        check: Callable[[PreparedCheckpoint], None] = lambda prepared: None,
    ) -> Commit:
        """Make a checkpoint of the parts of all ranks, and commit it.

        `admitted`: the result of `admit`. `observed`: facts for the entry's event, for people and for the cadence;
        `flush_s` is added if the save began at `began_s`. `sealed`: index and manifest in memory, if they are made.
        `cost_s`: how long training waited, by default the whole time. `check` may refuse the checkpoint before its
        entry is put. Raises StateError if the checkpoint names a retired object. After FencedError or StoreError it is
        not committed; after CommitUncertainError it may be committed: the objects stay, since the entry may still
        reach the store.
        """
        head, state = admitted
        prepared, store, parent = prepare_checkpoint(saving, parts, sealed), self.history.store, self._line.digest
        check_sizes(store, prepared.manifest.objects)
        store.put(prepared.manifest.index.name, [prepared.index_bytes])
        store.put(attempt_prefix(saving.attempt) + MANIFEST_NAME, [prepared.manifest_bytes])
        check(prepared)
        if began_s is not None:
            flush_s = round(system().monotonic() - began_s, 6)
            observed, cost_s = {**observed, "flush_s": flush_s}, flush_s if cost_s is None else cost_s

        self._entered = saving.attempt
        event = {**observed, "kind": "commit", "step": saving.attempt.step}
        for attached in saving.attached:
            event |= attached.put(store, saving.attempt, self._line.step)
        new = partial(prepared.checkpoint, parent=parent, cost_s=cost_s or 0.0)
        retirement = self._pruner.with_commit(state, new(n=head.next_n))
        if retirement.checkpoints:
            event["retires"] = retirement.checkpoints

        def change(state: State, n: int) -> State:
            refuse_retired(state, prepared)
            return retirement.apply(state.with_checkpoint(new(n=n), frozenset()))

        entry = self.history.append(event, change, owner=self.owner)  # Here the checkpoint begins to exist.
        self._pruner.committed(entry.state, retirement, prepared.digest, prepared.own_names)
        return Commit(entry, prepared)

    def prune_behind(self, entry: Entry) -> None:
        """Prune the other checkpoints in the background after a commit."""
        self._pruner.follow(self.owner, entry.state)

    def note(
        self, name: str, fields: Mapping[str, Any], change: Callable[[State], State] = lambda state: state
    ) -> None:
        """Put an event into the ledger, with a change of the run's state. Raises FencedError or StoreError."""
        event = {**fields, "kind": "note", "note": name}
        self.history.append(event, lambda state, n: change(state), owner=self.owner)

    def heartbeat(self) -> Heartbeat:
        """Start a heartbeat and return it."""
        return Heartbeat(self.history, self.owner, self._owner_timeout_s)

    def release(self) -> bool:
        """Release the run directory; return False if another process owns it."""
        return release(self.history, self.owner, self._pruner.deleted)


def check_sizes(store: Store, records: Sequence[ObjectRecord]) -> None:
    """Raise IntegrityError if an object in the store has another size than its record."""
    for record, size_bytes in zip(records, store.sizes([record.name for record in records]), strict=True):
        if size_bytes != record.size_bytes:
            raise IntegrityError(f"an object has {size_bytes} bytes of {record.size_bytes}", key=record.name)


def refuse_retired(state: State, prepared: PreparedCheckpoint) -> None:
    """Raise StateError if a checkpoint names an object that may be deleted.

    Only objects of live checkpoints are sure to exist: the ledger may no longer list an object that was retired.
    """
    manifest = prepared.manifest
    gone = [record.name for record in (*manifest.objects, manifest.index) if state.has_retired(record.name)]
    gone += [name for name in prepared.reuses if not state.keeps(name)]
    if gone:
        raise StateError("the checkpoint names an object that has been retired", key=min(gone), step=manifest.step)


def discard(store: Store, attempt: Attempt) -> None:
    """Delete the objects of an attempt that failed before its commit; a later owner deletes what remains."""
    with suppress(CkptError):
        store.delete_all(store.names(attempt_prefix(attempt)))
