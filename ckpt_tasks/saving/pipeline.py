"""Snapshots on their way to storage: one is written, one waits, and the newest wins.

Training fills a slot and goes on. A thread digests and seals the snapshot; another one writes and commits it, and then
takes the one that waits by then. A third snapshot takes the place of the one that waits, unless that one must be kept.

Invariants

1. A slot is filled only while no thread reads it, and once the newest snapshot is sealed in the other one.
2. Snapshots are committed in the order in which they were taken.
3. A failure is kept until somebody has been told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from ckpt_tasks.errors import CommitUncertainError, FencedError, StoreError
from ckpt_tasks.saving.commit import PreparedCheckpoint
from ckpt_tasks.saving.committer import Committer
from ckpt_tasks.saving.parts import RankPart, Saving, SupersededError
from ckpt_tasks.snapshot.device import DeviceCopy
from ckpt_tasks.snapshot.memory import SLOTS
from ckpt_tasks.snapshot.snapshot import ImageSet
from ckpt_tasks.state.threads import lower_priority
from ckpt_tasks.storage.progress import watching

__all__ = ["Pipeline", "Snapshot"]

_LOOK_S = 1.0  # how often whoever waits looks whether the store is stuck
_LAST = (FencedError, CommitUncertainError)  # nothing may follow what lost the run, or may have landed


@dataclass(eq=False, kw_only=True)
class Snapshot:
    """One moment of training in memory, on its way.

    `keep`: no newer one may take its place. `known` is set when `described` or `error` is; `digested` has the parts of
    its images until then, as written and with what can be reused, and None at the end. `copy` is under way from
    devices: its wait() comes before anything that reads the images. `base` is the checkpoint whose objects it may
    reuse.
    """

    slot: str
    committer: Committer
    saving: Saving
    images: ImageSet
    stall_s: float
    keep: bool
    observed: Mapping[str, Any]
    copy: DeviceCopy | None = None
    taken_s: float = field(default_factory=time.monotonic)
    base: str | None = None
    prepared: PreparedCheckpoint | None = None
    error: BaseException | None = None
    given_up: bool = False
    flushed: bool = False
    known: threading.Event = field(default_factory=threading.Event)
    digested: SimpleQueue[tuple[RankPart, RankPart] | None] = field(default_factory=SimpleQueue)

    def wait_prepared(self) -> PreparedCheckpoint:
        """Wait until the snapshot is digested; raise what went wrong."""
        self.known.wait()
        if self.error is not None:
            raise self.error
        assert self.prepared is not None
        return self.prepared


class Pipeline:
    """Run `seal` and `flush` for every snapshot, each in a thread; a flush is stuck after `timeout_s` without progress.

    `seal` is also told which snapshot lies in the other slot, where storage does not have that; `sealed` is called
    after it, when the slot may be filled again.
    """

    def __init__(
        self,
        seal: Callable[[Snapshot, Snapshot | None], None],
        sealed: Callable[[Snapshot], None],
        flush: Callable[[Snapshot], None],
        timeout_s: float,
    ):
        self._seal = seal
        self._sealed = sealed
        self._flush = flush
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._flushing: Snapshot | None = None
        self._waiting: Snapshot | None = None
        self._last: Snapshot | None = None
        self._moved_s = 0.0
        self._failure: BaseException | None = None
        self._running = False
        self._sealer: threading.Thread | None = None
        self._ended = False
        self._held: str | None = None
        self._in_slot: dict[str, Snapshot] = {}
        self._superseded: list[int] = []

    @property
    def stuck(self) -> bool:
        """Whether the store has taken nothing of the flush under way for longer than it may."""
        with self._changed:
            return self._flushing is not None and time.monotonic() - self._moved_s > self._timeout_s

    def stuck_error(self) -> StoreError:
        """Return what is raised where the store is stuck, with the newest step that is not committed."""
        left = self.under_way
        stuck = StoreError(
            f"the store has taken nothing for {self._timeout_s:.0f} s",
            step=left[-1].saving.attempt.step if left else None,
            hint="Look at the store. What is in the memory directory is restored by the next start on this host.",
        )
        stuck.transient = True
        return stuck

    @property
    def has_ended(self) -> bool:
        """Whether the interpreter ends: threads beside the main one hand in nothing more."""
        return self._ended

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        with self._changed:
            return self._flushing is None and self._waiting is None

    @property
    def under_way(self) -> list[Snapshot]:
        """The snapshots that are not committed yet, in their order."""
        with self._changed:
            return [snapshot for snapshot in (self._flushing, self._waiting) if snapshot is not None]

    def take_slot(self) -> str:
        """Return the slot to fill next; waits only where a snapshot that must be kept stands in the way."""
        if self._last is not None:
            self._last.known.wait()  # until it is sealed, the other slot has the only complete snapshot
        with self._changed:
            self._changed.wait_for(self._goes_on)
            while self._flushing and self._waiting and self._waiting.keep and not self.stuck:
                self._changed.wait(_LOOK_S)
            waiting, flushing = self._waiting, self._flushing
            if waiting and flushing:
                waiting.given_up = True
                self._waiting = None
                self._superseded.append(waiting.saving.attempt.step)
                slot = waiting.slot
            else:  # what waits is about to be taken up; else the newest of all stays as long as it can
                slot = self.next_slot()
            before = self._in_slot.get(slot)
        if before is not None:
            before.given_up = True  # also where its flush has failed: nobody may read the slot any more
            before.known.wait()
        return slot

    def next_slot(self) -> str:
        """Return the slot that does not hold the newest snapshot."""
        used = self._waiting or self._flushing or self._last
        if used is not None and used is self._last and used.error is not None and used is not self._flushing:
            return used.slot  # it has come to nothing
        return next(slot for slot in SLOTS if slot != (used.slot if used else self._held))

    def hold(self, slot: str | None) -> None:
        """Fill the other slot first; nothing may be on its way."""
        if self._last is not None:
            self._last.known.wait()
        self._held, self._last = slot, None

    def forget(self) -> None:
        """Let every snapshot go that has been dealt with; nothing may be on its way."""
        with self._changed:
            snapshots, self._in_slot = [*self._in_slot.values()], {}
            last, self._last = self._last, None
            if last is not None:
                self._held = last.slot
        for snapshot in snapshots:
            snapshot.given_up = snapshot is not last  # the newest is sealed first: it is what the next process finds
            snapshot.known.wait()
            snapshot.given_up = True

    def submit(self, snapshot: Snapshot) -> None:
        """Take a full slot over.

        Raises what lost the run meanwhile, and RuntimeError where the process can have no further thread; then the
        slot is the caller's.
        """
        with self._changed:
            # The thread is about to take up what waits.
            self._changed.wait_for(lambda: self._waiting is None and self._goes_on())
            if isinstance(self._failure, _LAST):
                failure, self._failure = self._failure, None
                raise failure
            # Both threads wait for this lock first, so that training goes on before they begin.
            if not self._running:
                threading.Thread(target=self._run, name="ckpt-flush", daemon=True).start()
                self._running = True  # until it finds nothing to do
            about = (snapshot, self._not_stored(snapshot.slot))
            sealer = threading.Thread(target=self._digest, args=about, name="ckpt-seal", daemon=True)
            sealer.start()
            self._sealer, self._last, self._waiting = sealer, snapshot, snapshot
            self._in_slot[snapshot.slot] = snapshot

    def _not_stored(self, slot: str) -> Snapshot | None:
        """Return the snapshot in the other slot, unless storage has it: on its way there, or its flush has failed."""
        other = next((one for name, one in self._in_slot.items() if name != slot), self._flushing)
        return None if other is None or other.flushed else other

    def wait(self) -> bool:
        """Wait until nothing is on its way; False where the flush under way is stuck."""
        with self._changed:
            while self._flushing or self._waiting:
                if self.stuck:
                    return False
                self._changed.wait(min(_LOOK_S, self._timeout_s))
            return True

    def take_failure(self) -> BaseException | None:
        """Return what went wrong since the last call; whoever asks has been told."""
        with self._changed:
            failure, self._failure = self._failure, None
            return failure

    @property
    def superseded(self) -> list[int]:
        """The steps that a newer snapshot took the place of, and that no ledger entry names yet."""
        with self._changed:
            return [*self._superseded]

    def forget_superseded(self, superseded: list[int]) -> None:
        """Forget these steps, the first of `superseded`: a ledger entry names them."""
        with self._changed:
            del self._superseded[: len(superseded)]

    # ── threads ──────────────────────────────────────────────────────────────────────────────────────────────

    def _digest(self, snapshot: Snapshot, before: Snapshot | None) -> None:
        lower_priority()
        with self._changed:
            pass  # submit() has it
        try:
            if snapshot.copy is not None:
                snapshot.copy.wait()
            if before is not None:
                before.known.wait()
            self._seal(snapshot, before)
        except SupersededError as error:
            snapshot.error = error
        except BaseException as error:  # noqa: BLE001 (the flush raises it, and the trainer is told)
            snapshot.error = error
        finally:
            snapshot.digested.put(None)
            snapshot.known.set()
        if snapshot.error is None:
            self._sealed(snapshot)

    def _run(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                snapshot: Snapshot | None = self._waiting
                self._flushing, self._waiting, self._moved_s = snapshot, None, time.monotonic()
                if snapshot is None:
                    self._running = False
                    self._changed.notify_all()
                    return
                self._changed.notify_all()
            failure: BaseException | None = None
            try:
                with watching(self._moved):
                    self._flush(snapshot)
            except SupersededError:
                failure = None  # nobody wants it any more
            except BaseException as error:  # noqa: BLE001 (kept for the trainer, who raises it)
                failure = error
            else:
                snapshot.flushed = True
            with self._changed:
                self._flushing = None
                if failure is not None:
                    if self._failure is None or isinstance(failure, _LAST):
                        self._failure = failure
                    if isinstance(failure, _LAST):
                        self._give_up()
                self._changed.notify_all()

    def _give_up(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.given_up = True

    def _moved(self) -> None:
        self._moved_s = time.monotonic()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────

    def end(self) -> bool:
        """Wait at the interpreter's end, as wait() does, and take nothing more from daemon threads that still train."""
        with self._changed:
            self._ended = True
        done = self.wait()
        if self._sealer is not None:
            self._sealer.join(self._timeout_s)  # a thread that is within torch while the interpreter ends aborts it
        return done

    def _goes_on(self) -> bool:
        """Whether this thread may hand in a snapshot; at the interpreter's end a daemon thread waits to be stopped."""
        return not self._ended or threading.current_thread() is threading.main_thread()
