"""Snapshots on their way to storage: one is written, one waits, and the newest one replaces the waiting one.

Training fills a slot and continues. One thread digests and seals the snapshot. Another thread writes and commits it,
then takes the snapshot that waits. A third snapshot replaces the waiting one, unless that one must be kept. This module
has the data that training and these threads share; `writer.py` starts the threads.

Invariants

1. A slot is filled only while no thread reads it. The slot with the newest sealed snapshot is filled only if the other
   slot holds a sealed one too, or if storage has this snapshot or a newer one.
2. Snapshots are committed in the order in which they were taken.
3. A failure is kept until the trainer takes it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

from ckpt_tasks.checkpoint.memory.memory import SLOTS
from ckpt_tasks.checkpoint.memory.snapshot import ImageSet, LateCopy
from ckpt_tasks.checkpoint.save.ending import say_wait
from ckpt_tasks.checkpoint.save.parts import Digested, Saving
from ckpt_tasks.checkpoint.save.prepared import PreparedCheckpoint
from ckpt_tasks.checkpoint.save.tenure import Spent, Tenure
from ckpt_tasks.errors import CommitUncertainError, FencedError, StoreError
from ckpt_tasks.format.records import Checkpoint, Compared, Seal
from ckpt_tasks.state.kinds.group_parts import GroupFile
from ckpt_tasks.state.tensors.device import DeviceCopy
from ckpt_tasks.storage.port import watched
from ckpt_tasks.system import system

_log = logging.getLogger("ckpt_tasks")
_LOOK_S = 1.0  # A waiting thread checks at this interval whether the store is stuck.
# After these errors no other snapshot may be committed: the run is lost, or the commit may have succeeded.
_LAST = (FencedError, CommitUncertainError)


class Committed(NamedTuple):
    """The outcome of a snapshot that is committed; its checkpoint exists."""

    checkpoint: Checkpoint


class Superseded(NamedTuple):
    """The outcome of a snapshot that a newer one replaced."""


class Failed(NamedTuple):
    """The outcome of a snapshot that was not committed, because of `error`."""

    error: BaseException


Outcome = Committed | Superseded | Failed


@dataclass(eq=False, kw_only=True)
class Snapshot:
    """One moment of training in memory, on its way to storage.

    `keep`: no newer snapshot may replace this one. `digested`: a queue of each digested file, then None; then `known`
    is set, and `error` says why digesting ended early. `sealed`: the index and manifest in memory. `copy` may be
    unfinished: call its wait() before you read the images. `given_up`: the threads must drop the snapshot.
    `superseded`: the steps of the snapshots that this one replaced. `outcome`: how the flush ended. `patience`: the
    flush is stuck after this many timeouts, since it may wait for other ranks. `unsealed`: the snapshot has no seal in
    memory. `compared` returns the values that ranks compare. `files`: the files that groups write by themselves.
    """

    slot: str
    tenure: Tenure
    saving: Saving
    images: ImageSet
    stall_s: float
    keep: bool
    spent: Spent
    copy: DeviceCopy | LateCopy | None = None
    compared: Callable[[], Compared] = dict
    files: Sequence[GroupFile] = ()
    taken_s: float = field(default_factory=lambda: system().monotonic())
    sealed: PreparedCheckpoint | None = None
    error: BaseException | None = None
    given_up: bool = False
    patience: int = 1
    unsealed: bool = False
    superseded: tuple[int, ...] = ()
    outcome: Outcome | None = None
    known: threading.Event = field(default_factory=lambda: system().event())
    digested: SimpleQueue[Digested | None] = field(default_factory=lambda: system().queue())

    @property
    def lacks_seal(self) -> bool:
        """Whether the snapshot could not be sealed; False until that is `known`."""
        return self.unsealed or self.error is not None

    def wait_digested(self) -> None:
        """Wait until the snapshot is digested; raise the error that ended digesting."""
        self.known.wait()
        if self.error is not None:
            raise self.error

    def seal_of(self, prepared: PreparedCheckpoint, in_flight: str | None) -> Seal:
        """Return the snapshot's seal; `in_flight`: the digest of the previous checkpoint if it is not committed yet."""
        newest = self.tenure.line.digest
        return Seal(
            run_key=self.saving.run_key,
            checkpoint=prepared.checkpoint(parent=newest, n=-1, cost_s=self.stall_s),
            newest=newest,
            in_flight=in_flight,
            compared=self.compared(),
        )


def checkpoint_of(snapshot: Snapshot | None) -> Checkpoint:
    """Return a snapshot's checkpoint, after `wait`; raise its failure, even if another thread has taken that."""
    outcome = snapshot.outcome if snapshot is not None else None
    if isinstance(outcome, Committed):
        return outcome.checkpoint
    raise outcome.error if isinstance(outcome, Failed) else StoreError("another thread was told why it failed")


class Pipeline:
    """The snapshots under way (one is being flushed, one waits), the replaced ones, and the content of the slots.

    A flush is stuck after `timeout_s` without progress.
    """

    def __init__(self, timeout_s: float):
        self.running = False  # True while a thread takes snapshots; it stops when no snapshot waits.
        self._timeout_s = timeout_s
        self._changed = system().condition()
        self._flushing: Snapshot | None = None
        self._waiting: Snapshot | None = None
        self._last: Snapshot | None = None
        self._moved_s = 0.0
        self._failure: BaseException | None = None
        self._ended = False
        self._held: str | None = None
        self._held_lacks = False  # True if storage lacks the snapshot in the held slot and has no newer one.
        self._in_slot: dict[str, Snapshot] = {}
        self._stored_s = -math.inf  # When the newest committed snapshot was taken.
        self.superseded: list[int] = []  # The steps of replaced snapshots that no ledger entry names yet.
        self._replaced: list[Snapshot] = []
        self._warned_stuck = False
        self._watched = watched()

    @property
    def stuck(self) -> bool:
        """Whether the running flush has made no progress for too long, because of the store or of other ranks."""
        with self._changed:
            flushing, silent_s = self._flushing, system().monotonic() - self._moved_s
            return flushing is not None and silent_s > flushing.patience * self._timeout_s

    def _stuck_error(self, more: str = "") -> StoreError:
        left = self.under_way
        stuck = StoreError(
            f"the store has taken nothing for {self._timeout_s:g} s{more}",
            step=left[-1].saving.attempt.step if left else None,
            hint="Check the store. The next start on this host restores what is in the memory directory.",
        )
        stuck.transient = True
        return stuck

    @property
    def has_ended(self) -> bool:
        """Whether the interpreter is exiting: then only the main thread may still submit snapshots."""
        return self._ended

    @property
    def idle(self) -> bool:
        """Whether no snapshot is under way."""
        with self._changed:
            return self._flushing is None and self._waiting is None

    @property
    def under_way(self) -> list[Snapshot]:
        """The snapshots that are not committed yet, oldest first."""
        with self._changed:
            return [snapshot for snapshot in (self._flushing, self._waiting) if snapshot is not None]

    def warn_if_stuck(self, step: int) -> None:
        """Log once that a snapshot is kept in memory only, because the store is stuck."""
        stuck = self.stuck
        if stuck and not self._warned_stuck:
            what = "The store has taken nothing for %g s; step %d and later ones are kept in memory only"
            _log.warning(what, self._timeout_s, step)
        self._warned_stuck = stuck

    def take_slot(self) -> str:
        """Return the slot to fill next; if no slot may be filled yet, wait for a flush.

        Raises StoreError if the store is stuck and the slot holds the only snapshot for a restart.
        """
        self.wait_sealed()  # Until then the other slot holds the only complete snapshot.
        with self._changed:
            # If a snapshot waits while no flush runs, the flush thread is about to take the snapshot.
            self._changed.wait_for(lambda: self._goes_on() and (self._flushing is not None or self._waiting is None))
            while self._flushing and ((self._waiting and self._waiting.keep) or self._is_only(self.next_slot())):
                if self.stuck:
                    break
                self._changed.wait(min(_LOOK_S, self._timeout_s))
            slot = self.next_slot()
            if self._is_only(slot):
                raise self._stuck_error(" and the memory directory no seal; the last sealed snapshot stays there")
            if self._flushing and self._waiting:
                waiting, self._waiting = self._waiting, None
                waiting.given_up = True
                self.superseded.append(waiting.saving.attempt.step)
                self._replaced.append(waiting)
            before = self._in_slot.pop(slot, None)
            self._held_lacks = self._held_lacks and slot != self._held
        if before is not None:
            before.given_up = True  # Even after a failed flush, no thread may read the slot any more.
            before.known.wait()
        return slot

    def wait_sealed(self) -> None:
        """Wait until the newest snapshot is sealed, or cannot be sealed."""
        if self._last is not None:
            self._last.known.wait()

    def next_slot(self) -> str:
        """Return the slot that no flush reads; if both are free, the slot without the newest sealed snapshot."""
        sealed = (snapshot for snapshot in self._in_slot.values() if not snapshot.lacks_seal)
        newest = self._flushing or max(sealed, key=lambda snapshot: snapshot.taken_s, default=None)
        return next(slot for slot in SLOTS if slot != (newest.slot if newest else self._held))

    def _is_only(self, slot: str) -> bool:
        """Return True if only this slot is left for a restart: neither storage nor the other slot has one as new."""
        others = (snapshot for name, snapshot in self._in_slot.items() if name != slot)
        return self._only_memory_has(slot) and any(other.lacks_seal for other in others)

    def _only_memory_has(self, slot: str) -> bool:
        if (snapshot := self._in_slot.get(slot)) is None:
            return slot == self._held and self._held_lacks
        return not snapshot.lacks_seal and snapshot.taken_s > self._stored_s

    def hold(self, slot: str | None, *, lacks: bool) -> None:
        """Hold a slot that has the restored snapshot: fill the other slot first; no snapshot may be under way.

        `lacks`: storage does not have the snapshot.
        """
        self.wait_sealed()
        with self._changed:
            self._held, self._held_lacks, self._last = slot, lacks, None
            self._in_slot = {} if self._flushing is None else {self._flushing.slot: self._flushing}

    def forget_snapshots(self) -> None:
        """Forget every snapshot; none may be under way."""
        snapshots, last = [*self._in_slot.values()], self._last
        for snapshot in snapshots:
            snapshot.given_up = snapshot is not last  # The newest is sealed first: the next process will restore it.
            snapshot.known.wait()
            snapshot.given_up = True
        held = next(slot for slot in SLOTS if slot != self.next_slot())
        self.hold(held, lacks=self._only_memory_has(held))

    @contextmanager
    def submitting(self, snapshot: Snapshot) -> Iterator[Snapshot | None]:
        """Run a block that starts the threads, then accept a filled slot; yield the other slot's snapshot or None.

        The other snapshot is yielded only if storage lacks it. The threads wait until the block has ended, so that
        training continues before they work. If the block fails or the run was lost, the error is raised and the slot is
        not accepted.
        """
        with self._changed:
            # The flush thread is about to take the waiting snapshot.
            self._changed.wait_for(lambda: self._waiting is None and self._goes_on())
            if isinstance(self._failure, _LAST):
                failure, self._failure = self._failure, None
                raise failure
            yield self._not_stored(snapshot.slot)
            self._last = self._waiting = snapshot
            self._in_slot[snapshot.slot] = snapshot

    def _not_stored(self, slot: str) -> Snapshot | None:
        """Return the snapshot in the other slot if storage lacks it because its flush is under way or has failed."""
        others = (snapshot for name, snapshot in self._in_slot.items() if name != slot)
        return next((other for other in others if not isinstance(other.outcome, Committed)), None)

    def ended_with(self) -> BaseException | None:
        """Wait until no snapshot is under way; return the failure as `take_failure` does, or StoreError if stuck."""
        idle = self.await_idle()
        failure = self.take_failure()
        return failure if failure is not None or idle else self._stuck_error()

    def await_idle(self) -> bool:
        """Wait until no snapshot is under way; return False if the running flush is stuck."""
        said = False
        with self._changed:
            while self._flushing or self._waiting:
                if self.stuck:
                    return False
                self._changed.wait(min(_LOOK_S, self._timeout_s))
                if self._flushing and not said:
                    said = say_wait(self._flushing.saving.attempt.step, self._moved_s, self._timeout_s)
            return True

    def take_failure(self) -> BaseException | None:
        """Return the failure since the last call, and forget it."""
        with self._changed:
            failure, self._failure = self._failure, None
            return failure

    def fail(self, failure: BaseException) -> None:
        """Keep the first failure and every final one; a final failure also drops the waiting snapshot."""
        final = isinstance(failure, _LAST)
        with self._changed:
            if self._failure is None or final:
                self._failure = failure
            if final and self._waiting is not None:
                self._waiting.given_up = True
                self._waiting = None

    # ── for the threads ──────────────────────────────────────────────────────────────────────────────────────

    def take(self) -> list[Snapshot]:
        """Return the snapshots that the waiting one has replaced, then the waiting one; an empty list if none waits."""
        with self._changed:
            waiting, replaced = self._waiting, self._replaced
            self._flushing, self._waiting, self._moved_s = waiting, None, system().monotonic()
            self.running = waiting is not None
            self._changed.notify_all()
            if waiting is None:
                return []
            self._replaced, waiting.superseded = [], tuple(self.superseded)
            return [*replaced, waiting]

    def ended(self, snapshot: Snapshot, outcome: Outcome) -> None:
        """Record how the flush of a snapshot has ended."""
        with self._changed:
            if snapshot is not self._flushing:
                return  # A newer snapshot has replaced this one.
            snapshot.outcome, self._flushing = outcome, None
            if isinstance(outcome, Committed):
                self._stored_s, self._held_lacks = snapshot.taken_s, False
                del self.superseded[: len(snapshot.superseded)]
            if isinstance(outcome, Failed):
                self.fail(outcome.error)
            self._changed.notify_all()

    def broke(self, error: BaseException) -> None:
        """Drop the snapshots under way: the thread that flushes ends with an error."""
        with self._changed:
            for snapshot in (self._flushing, self._waiting):
                if snapshot is not None:
                    snapshot.given_up, snapshot.outcome = True, Failed(error)
            self._flushing = self._waiting = None
            self.running = False
            self.fail(error)
            self._changed.notify_all()

    def moved(self) -> None:
        """Record that the flush has made progress."""
        self._moved_s = system().monotonic()
        self._watched()

    def submitted(self) -> None:
        """Wait until the block of `submitting` has ended."""
        with self._changed:
            pass

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────

    def end_queue(self) -> BaseException | None:
        """Wait as ended_with() does, while the interpreter exits: daemon threads that train can no longer submit."""
        with self._changed:
            self._ended = True
        return self.ended_with()

    def _goes_on(self) -> bool:
        """Return True if this thread may submit a snapshot; when the interpreter exits, a daemon thread must wait."""
        return not self._ended or threading.current_thread() is threading.main_thread()
