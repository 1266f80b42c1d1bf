"""Snapshots on their way to storage: one is written, one waits, and the newest wins.

Training fills a slot and continues. One thread digests and seals the snapshot. Another thread writes and commits it,
then takes the snapshot that waits. A third snapshot replaces the waiting one, unless the waiting one must be kept.

Invariants

1. A slot is filled only while no thread reads it. The slot with the newest sealed snapshot is filled only if the other
   slot holds a sealed one too, or if storage has this snapshot or a newer one.
2. Snapshots are committed in the order in which they were taken.
3. A failure is kept until the trainer takes it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

from ckpt_tasks.errors import CommitUncertainError, FencedError, StoreError
from ckpt_tasks.format.records import Checkpoint, Compared, Seal
from ckpt_tasks.saving.commit import PreparedCheckpoint
from ckpt_tasks.saving.committer import Committer, Follower
from ckpt_tasks.saving.ending import say_wait
from ckpt_tasks.saving.parts import RankPart, Saving, SupersededError
from ckpt_tasks.snapshot.device import DeviceCopy
from ckpt_tasks.snapshot.memory import SLOTS
from ckpt_tasks.snapshot.snapshot import ImageSet
from ckpt_tasks.storage.port import watching
from ckpt_tasks.system import system

__all__ = ["Committed", "Failed", "Outcome", "Pipeline", "Snapshot", "Superseded"]

_LOOK_S = 1.0  # a waiting thread checks this often whether the store is stuck
_FOR_RANKS = 2  # times the timeout: the flush gives up earlier, and says which rank it waited for
_LAST = (FencedError, CommitUncertainError)  # no snapshot may follow: the run is lost, or the commit may have succeeded


class Committed(NamedTuple):
    """The checkpoint exists."""

    checkpoint: Checkpoint


class Superseded(NamedTuple):
    """A newer snapshot took this one's place."""


class Failed(NamedTuple):
    """The snapshot was not committed, because of `error`."""

    error: BaseException


Outcome = Committed | Superseded | Failed


@dataclass(eq=False, kw_only=True)
class Snapshot:
    """One moment of training in memory, on its way to storage.

    `keep`: no newer snapshot may replace it. `known` is set once `prepared` or `error` is; until then `digested` yields
    two parts of each image, as written and with reused objects, and then None. `copy` runs on devices: call its wait()
    before reading the images. `base` is the checkpoint whose objects may be reused. `given_up` asks the threads to
    drop the snapshot; `outcome` says how its flush ended. `handed_in`: the flush waits for other ranks. `unsealed`: the
    memory directory could not take its seal. `compared` returns what is compared between ranks.
    """

    slot: str
    committer: Committer | Follower
    saving: Saving
    images: ImageSet
    stall_s: float
    keep: bool
    observed: Mapping[str, Any]
    copy: DeviceCopy | None = None
    compared: Callable[[], Compared] = dict
    taken_s: float = field(default_factory=lambda: system().monotonic())
    base: str | None = None
    prepared: PreparedCheckpoint | None = None
    error: BaseException | None = None
    given_up: bool = False
    handed_in: bool = False
    unsealed: bool = False
    outcome: Outcome | None = None
    known: threading.Event = field(default_factory=lambda: system().event())
    digested: SimpleQueue[tuple[RankPart, RankPart] | None] = field(default_factory=lambda: system().queue())

    @property
    def lacks_seal(self) -> bool:
        """Whether the snapshot could not be sealed; False as long as it is not `known`."""
        return self.unsealed or self.error is not None

    def wait_digested(self) -> None:
        """Wait until the snapshot is digested; raise the error that digesting ended with."""
        self.known.wait()
        if self.error is not None:
            raise self.error

    def wait_prepared(self) -> PreparedCheckpoint:
        """Wait until the snapshot is digested, and return the checkpoint that it would become."""
        self.wait_digested()
        assert self.prepared is not None
        return self.prepared

    def seal_of(self, prepared: PreparedCheckpoint, in_flight: str | None) -> Seal:
        """Return the seal of the snapshot in memory; `in_flight` names the one before it, if storage lacks that."""
        newest = self.committer.line.digest
        return Seal(
            run_key=self.saving.run_key,
            checkpoint=prepared.checkpoint(parent=newest, n=-1, cost_s=self.stall_s),
            newest=newest,
            in_flight=in_flight,
            compared=self.compared(),
        )


class Pipeline:
    """Run `seal` and `flush` for every snapshot, each in a thread; a flush is stuck after `timeout_s` without progress.

    `seal` also gets the snapshot in the other slot if storage lacks it. `sealed` is called when the slot may be filled
    again. `flush` returns the checkpoint that it committed, or raises. `tells_superseded`: it is called for a replaced
    snapshot, too, which other ranks may be about to commit.
    """

    def __init__(
        self,
        seal: Callable[[Snapshot, Snapshot | None], None],
        sealed: Callable[[Snapshot], None],
        flush: Callable[[Snapshot], Checkpoint],
        timeout_s: float,
        *,
        tells_superseded: bool = False,
    ):
        self._seal = seal
        self._sealed = sealed
        self._flush = flush
        self._timeout_s = timeout_s
        self._changed = system().condition()
        self._flushing: Snapshot | None = None
        self._waiting: Snapshot | None = None
        self._last: Snapshot | None = None
        self._moved_s = 0.0
        self._failure: BaseException | None = None
        self._running = False
        self._sealer: threading.Thread | None = None
        self._ended = False
        self._held: str | None = None
        self._held_lacks = False  # storage does not have the snapshot in the held slot, nor a newer one
        self._in_slot: dict[str, Snapshot] = {}
        self._stored_s = -math.inf  # when the newest committed snapshot was taken
        self._superseded: list[int] = []
        self._tells_superseded = tells_superseded
        self._replaced: list[Snapshot] = []

    @property
    def stuck(self) -> bool:
        """Whether the store, or the other ranks, have taken nothing of the running flush for too long."""
        with self._changed:
            patience = _FOR_RANKS if self._flushing is not None and self._flushing.handed_in else 1
            return self._flushing is not None and system().monotonic() - self._moved_s > patience * self._timeout_s

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
        """Whether the interpreter is ending: only the main thread may still submit snapshots."""
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

    def take_slot(self) -> str:
        """Return the slot to fill next; wait for a flush if neither may be filled before.

        Raises StoreError if the store is stuck then, and the slot holds the only snapshot for a restart.
        """
        if self._last is not None:
            self._last.known.wait()  # until then the other slot holds the only complete snapshot
        with self._changed:
            # The flush thread is about to take the waiting one.
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
                self._superseded.append(waiting.saving.attempt.step)
                if self._tells_superseded:
                    self._replaced.append(waiting)
            before = self._in_slot.pop(slot, None)
            self._held_lacks = self._held_lacks and slot != self._held
        if before is not None:
            before.given_up = True  # also if its flush failed: no thread may read the slot any more
            before.known.wait()
        return slot

    def next_slot(self) -> str:
        """Return the slot that no flush reads; if none reads any, the one without the newest sealed snapshot."""
        sealed = (snapshot for snapshot in self._in_slot.values() if not snapshot.lacks_seal)
        newest = self._flushing or max(sealed, key=lambda snapshot: snapshot.taken_s, default=None)
        return next(slot for slot in SLOTS if slot != (newest.slot if newest else self._held))

    def _is_only(self, slot: str) -> bool:
        """Whether a slot holds a sealed snapshot, and neither the other slot nor storage has it or a newer one."""
        others = (snapshot for name, snapshot in self._in_slot.items() if name != slot)
        return self._only_memory_has(slot) and any(other.lacks_seal for other in others)

    def _only_memory_has(self, slot: str) -> bool:
        if (snapshot := self._in_slot.get(slot)) is None:
            return slot == self._held and self._held_lacks
        return not snapshot.lacks_seal and snapshot.taken_s > self._stored_s

    def hold(self, slot: str | None, *, lacks: bool) -> None:
        """Fill the other slot first, since this one holds the snapshot that was restored; none may be under way.

        `lacks`: storage does not have the snapshot.
        """
        if self._last is not None:
            self._last.known.wait()
        with self._changed:
            self._held, self._held_lacks, self._last = slot, lacks, None
            self._in_slot = {} if self._flushing is None else {self._flushing.slot: self._flushing}

    def forget(self) -> None:
        """Forget every snapshot; none may be under way."""
        snapshots, last = [*self._in_slot.values()], self._last
        for snapshot in snapshots:
            snapshot.given_up = snapshot is not last  # the newest is sealed first: the next process restores it
            snapshot.known.wait()
            snapshot.given_up = True
        held = next(slot for slot in SLOTS if slot != self.next_slot())
        self.hold(held, lacks=self._only_memory_has(held))

    def submit(self, snapshot: Snapshot) -> None:
        """Take over a full slot.

        Raises the error by which the run was lost, or RuntimeError if the process cannot start a thread; the slot stays
        the caller's then.
        """
        with self._changed:
            # The flush thread is about to take up the waiting snapshot.
            self._changed.wait_for(lambda: self._waiting is None and self._goes_on())
            if isinstance(self._failure, _LAST):
                failure, self._failure = self._failure, None
                raise failure
            # Both threads wait for this lock first, so training continues before they start.
            if not self._running:
                system().start_thread(self._run, name="ckpt-flush")
                self._running = True  # until no snapshot waits
            pair = (snapshot, self._not_stored(snapshot.slot))
            self._sealer = system().start_thread(self._digest, *pair, name="ckpt-seal")
            self._last = self._waiting = snapshot
            self._in_slot[snapshot.slot] = snapshot

    def _not_stored(self, slot: str) -> Snapshot | None:
        """Return the snapshot in the other slot if storage does not have it: its flush is under way or has failed."""
        others = (snapshot for name, snapshot in self._in_slot.items() if name != slot)
        return next((other for other in others if not isinstance(other.outcome, Committed)), None)

    def wait(self) -> BaseException | None:
        """Wait until no snapshot is under way; return the failure as `take_failure` does, StoreError if stuck."""
        idle = self.wait_idle()
        failure = self.take_failure()
        return failure if failure is not None or idle else self._stuck_error()

    def wait_idle(self) -> bool:
        """Wait until no snapshot is under way; return False if the running flush is stuck."""
        said = False
        with self._changed:
            while self._flushing or self._waiting:
                if self.stuck:
                    return False
                self._changed.wait(min(_LOOK_S, self._timeout_s))
                said = said or say_wait(self._flushing, self._moved_s, self._timeout_s)
            return True

    def take_failure(self) -> BaseException | None:
        """Return the failure since the last call, and forget it."""
        with self._changed:
            failure, self._failure = self._failure, None
            return failure

    def fail(self, failure: BaseException) -> None:
        """Remember the first failure, and any that is final; a final one also drops the waiting snapshot."""
        final = isinstance(failure, _LAST)
        with self._changed:
            if self._failure is None or final:
                self._failure = failure
            if final and self._waiting is not None:
                self._waiting.given_up = True
                self._waiting = None

    @property
    def superseded(self) -> list[int]:
        """The steps of replaced snapshots that no ledger entry names yet."""
        with self._changed:
            return [*self._superseded]

    def forget_superseded(self, superseded: list[int]) -> None:
        """Forget the first `superseded` steps: a ledger entry names them."""
        with self._changed:
            del self._superseded[: len(superseded)]

    # ── threads ──────────────────────────────────────────────────────────────────────────────────────────────

    def _digest(self, snapshot: Snapshot, before: Snapshot | None) -> None:
        with self._changed:
            pass  # submit() holds it
        system().lower_priority()  # only now: submit() waits for this thread to start
        try:
            if snapshot.copy is not None:
                snapshot.copy.wait()
            if before is not None:
                before.known.wait()
            self._seal(snapshot, before)
        except BaseException as error:  # noqa: BLE001 (the flush raises it, and the trainer takes it)
            snapshot.error = error
        finally:
            snapshot.digested.put(None)
            snapshot.known.set()
        if not snapshot.lacks_seal:
            self._sealed(snapshot)

    def _run(self) -> None:
        with self._changed:
            pass  # as above
        system().lower_priority()
        while True:
            with self._changed:
                snapshot: Snapshot | None = self._waiting
                self._flushing, self._waiting, self._moved_s = snapshot, None, system().monotonic()
                if snapshot is None:
                    self._running = False
                    self._changed.notify_all()
                    return
                replaced, self._replaced = self._replaced, []
                self._changed.notify_all()
            for older in replaced:
                self._outcome_of(older)
            outcome = self._outcome_of(snapshot)
            with self._changed:
                snapshot.outcome, self._flushing = outcome, None
                if isinstance(outcome, Committed):
                    self._stored_s, self._held_lacks = snapshot.taken_s, False
                if isinstance(outcome, Failed):
                    self.fail(outcome.error)
                self._changed.notify_all()

    def _outcome_of(self, snapshot: Snapshot) -> Outcome:
        try:
            with watching(self._moved):
                return Committed(self._flush(snapshot))
        except SupersededError:
            return Superseded()
        except BaseException as error:  # noqa: BLE001 (kept for the trainer, who raises it)
            return Failed(error)

    def _moved(self) -> None:
        self._moved_s = system().monotonic()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────

    def end(self) -> BaseException | None:
        """Wait as wait() does, at the interpreter's end; daemon threads that still train cannot submit any more."""
        with self._changed:
            self._ended = True
        failure = self.wait()
        if self._sealer is not None:
            self._sealer.join(self._timeout_s)  # a thread inside torch would abort the interpreter
        return failure

    def _goes_on(self) -> bool:
        """Whether this thread may submit a snapshot; at the interpreter's end a daemon thread waits to be stopped."""
        return not self._ended or threading.current_thread() is threading.main_thread()
