"""Saves in the background: training waits only for `snapshot`; threads seal, write and commit the copy.

`one_save.py` has the save itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, NoReturn

from ckpt_tasks.checkpoint.extension import Extensions
from ckpt_tasks.checkpoint.memory.cache import SnapshotCache
from ckpt_tasks.checkpoint.memory.memory import SLOTS
from ckpt_tasks.checkpoint.memory.snapshot import Image
from ckpt_tasks.checkpoint.ranks.exchange import ALONE, Exchange
from ckpt_tasks.checkpoint.save.ending import report_lost
from ckpt_tasks.checkpoint.save.listening import Listeners
from ckpt_tasks.checkpoint.save.one_save import OneSave
from ckpt_tasks.checkpoint.save.parts import Saving, SupersededError
from ckpt_tasks.checkpoint.save.pipeline import Committed, Failed, Outcome, Pipeline, Snapshot, Superseded
from ckpt_tasks.checkpoint.save.pruning import Pruner
from ckpt_tasks.checkpoint.save.rank_saver import RankSaver
from ckpt_tasks.checkpoint.save.schedule import SaveSchedule
from ckpt_tasks.checkpoint.save.tenure import Tenure
from ckpt_tasks.errors import CkptError, StoreError
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.process import start_thread
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.state.kinds.group_parts import Captured
from ckpt_tasks.storage.port import watched, watching
from ckpt_tasks.system import system

_END_S = 5.0  # At the end, wait this long for a prune to stop, and for other ranks to read rank 0's answers.
_log = logging.getLogger("ckpt_tasks")


class UnderWay(NamedTuple):
    """The unfinished saves of a moment, and the memory for them.

    `steps`: the step that is being written, and the step that waits. `stuck`: the store has taken nothing for too long.
    `superseded`: the steps that newer steps have replaced since the last commit. `next_slot`: the slot of the next
    snapshot. `size_bytes`: the bytes that this rank writes for a checkpoint. `owner`: the id of this process's
    ownership, as far as it knows; None if it holds no run. `parent`: the identity of the checkpoint that the next one
    follows; None without an owner.
    """

    steps: Sequence[int]
    stuck: bool
    superseded: Sequence[int]
    next_slot: str
    size_bytes: int
    owner: str | None
    parent: str | None


class Saver:
    """Takes snapshots of the state and commits them in the background.

    `tenure`: the current ownership; the exit of the interpreter releases it. A snapshot is committed only under the
    ownership under which it was taken.
    """

    def __init__(
        self,
        history: History,
        config: CheckpointConfig,
        cache: SnapshotCache,
        pruner: Pruner,
        schedule: SaveSchedule,
        *,
        extensions: Extensions,
        ranks: Exchange = ALONE,
    ):
        self.listeners = Listeners()
        self.tenure: Tenure | None = None
        self._ranks = ranks
        self._config = config
        self._cache = cache
        self._pruner = pruner
        self._rank = RankSaver(cache, ranks.rank, ranks.size)
        self._pipeline = Pipeline(config.flush_timeout_s)
        self._save = OneSave(
            ranks=ranks,
            rank=self._rank,
            history=history,
            cache=cache,
            schedule=schedule,
            listeners=self.listeners,
            extensions=extensions,
            deadline_s=config.flush_timeout_s,
        )
        self._workers: list[threading.Thread] = []  # These threads seal snapshots, or allocate memory.
        self._early = False  # True if memory was prepared before a step; this step may change the state's structure.
        self._warned_stuck = False
        self._turn = system().lock()
        self._watched = watched()

    @property
    def unprepared(self) -> bool:
        """Whether to prepare memory for the next snapshot: there is none, or a step may have changed the structure."""
        return not self._rank.is_planned or (self._early and self._pipeline.idle)

    def prepare_early(self, take: Callable[[], Captured]) -> None:
        """Prepare the memory of the next snapshots after a restore, before a step; `take` captures the state."""
        if self.unprepared:
            with suppress(Exception):  # If a user's state_dict raises, it raises again in the first save.
                self.prepare(take())
                self._early = True

    def prepare(self, captured: Captured) -> None:
        """Prepare the memory of the next snapshots in the background.

        Does not touch a slot that holds a sealed snapshot, except the slot that is filled next.
        """
        self._early = False
        self._plan(captured)
        following = self._pipeline.next_slot()
        free = [slot for slot in SLOTS if slot != following and self._cache.memory.sealed(slot) is None]
        with suppress(StoreError):  # If no thread can start, the first saves allocate their memory.
            self._work(start_thread(self._rank.take_ahead, following, *free, name="ckpt-take", daemon=False))

    def snapshot(
        self,
        tenure: Tenure,
        saving: Saving,
        captured: Captured,
        *,
        started_s: float,
        keep: bool,
        step_s: float | None = None,
    ) -> Snapshot | None:
        """Copy a captured state and submit it; training has waited since `started_s`.

        `keep`: no newer snapshot may replace this one. `step_s`: seconds per step, for the ledger. Host tensors are
        copied on return; device tensors are copied before any device work that training queues later. Raises StoreError
        if there is no memory. If no slot may be filled, copies nothing, keeps the failure for `take_failure`, and
        returns None.
        """
        try:
            slot = self._pipeline.take_slot()
        except StoreError as error:
            error.step = saving.attempt.step
            self._pipeline.fail(error)
            with suppress(CkptError):
                self.refuse(tenure, error, saving.number)
            return None
        try:
            self._plan(captured)
            compared = self._rank.sample(captured, saving)
            images, copy = self._rank.fill(slot, captured)
            files = [file for table in captured.tables for file in table.take()]
        except StoreError as error:
            self.refuse(tenure, error, saving.number)
        self._early = saving.attempt.step == 0
        stall_s = system().monotonic() - started_s
        observed = {"stall_s": round(stall_s, 6)} | ({} if step_s is None else {"step_s": round(step_s, 6)})
        snapshot = Snapshot(
            slot=slot,
            tenure=tenure,
            saving=saving,
            images=images,
            stall_s=stall_s,
            keep=keep,
            observed=observed,
            copy=copy,
            compared=compared,
            files=files,
        )
        self._warn_if_stuck(saving.attempt.step)
        try:
            self._submit(snapshot)  # Do this last: the threads that it starts could delay a later statement.
        except BaseException as error:
            if copy is not None:  # No thread waits for the copy, and the slot will be refilled.
                copy.wait()
            if isinstance(error, StoreError):
                self.refuse(tenure, error, saving.number)
            raise
        return snapshot

    def checkpoint_of(self, snapshot: Snapshot | None) -> Checkpoint:
        """Return a snapshot's checkpoint, after `wait`; raise its failure, even if another thread has taken that."""
        outcome = snapshot.outcome if snapshot is not None else None
        if isinstance(outcome, Committed):
            return outcome.checkpoint
        raise outcome.error if isinstance(outcome, Failed) else StoreError("another thread was told why it failed")

    def wait(self) -> None:
        """Wait until every snapshot is committed; raise the first failure, or StoreError if the store is stuck."""
        self.listeners.check()
        failure = self._pipeline.wait()
        if failure is not None:
            raise failure

    def wait_idle(self) -> None:
        """Wait until no snapshot is under way or the store is stuck; keep a failure for a later call."""
        self.listeners.check()
        self._pipeline.wait_idle()

    def wait_sealed(self) -> None:
        """Wait until the last snapshot in memory is ready for a restart, or cannot be sealed."""
        self._pipeline.wait_sealed()

    def under_way(self) -> UnderWay:
        """Return the unfinished saves and the memory for them; do not wait."""
        return UnderWay(
            steps=[snapshot.saving.attempt.step for snapshot in self._pipeline.under_way],
            stuck=self._pipeline.stuck,
            superseded=[*self._pipeline.superseded],
            next_slot=self._pipeline.next_slot(),
            size_bytes=self._rank.size.own_bytes,
            owner=self.tenure.owner.id if self.tenure is not None else None,
            parent=self.tenure.line.digest if self.tenure is not None else None,
        )

    @property
    def images(self) -> Mapping[str, Sequence[Image]]:
        """The files of each slot that has memory; takes no lock, so a forked child may call it."""
        return self._rank.images

    def take_failure(self) -> BaseException | None:
        """Return the failure of an earlier snapshot and forget it; does not wait."""
        return self._pipeline.take_failure()

    def raise_failure(self) -> None:
        """Raise the failure of an earlier snapshot; with on_flush_failure="warn" log a StoreError instead."""
        failure = self.take_failure()
        if failure is None:
            return
        if self._config.on_flush_failure == "raise" or not isinstance(failure, StoreError):
            raise failure
        _log.warning("A checkpoint could not be saved; training continues: %s", failure)
        event = {"kind": "note", "note": "flush_failed", "step": failure.step, "why": str(failure)[:2000]}
        self._pruner.unnoted.append(event)  # The next commit writes the event into the history.

    def restored(self, slot: str | None, *, lacks: bool = False) -> None:
        """Fill the restored snapshot's slot only after the other slot; `lacks`: storage lacks the snapshot."""
        self._pipeline.hold(slot, lacks=lacks)

    def forget_plan(self) -> None:
        """Drop the plan and the images; the next snapshot makes new ones. No snapshot may be under way."""
        self._pipeline.forget()
        self._rank.forget()

    def turn(self) -> AbstractContextManager[Any]:
        """Return the lock of saving and closing: only one thread at a time may do either.

        When the interpreter exits, the main thread takes no lock, and daemon threads wait for the lock until Python
        stops them.
        """
        self.listeners.check()
        ends = self._pipeline.has_ended and threading.current_thread() is threading.main_thread()
        return nullcontext() if ends else self._turn

    def release(self) -> bool:
        """Release the run directory; return False if the store is stuck and cannot take the release."""
        if self._pipeline.stuck:
            return False
        tenure, self.tenure = self.tenure, None
        if tenure is not None and not tenure.release():
            self._cache.close(keep=False)  # A fenced process's memory is not part of the run.
        return True

    def finish(self) -> None:
        """Commit the saves under way of a garbage-collected Checkpointer, and release its memory for the next one."""
        failure = self._end_pipeline()
        if failure is not None:
            _log.warning("The last snapshot was not committed: %s", failure)
        self._pruner.cancel(_END_S)
        self._cache.close(keep=True)

    def end(self) -> None:
        """When the interpreter exits, commit the last snapshot and release the run; report lost steps."""
        kept = self._cache.outlives
        try:
            self._pruner.cancel(0)
            # A daemon thread may be taking a snapshot that replaces the previous one: wait until it has submitted the
            # snapshot, or neither is committed. A later daemon thread waits for the lock until Python stops it.
            self._turn.acquire(timeout=self._config.flush_timeout_s)
            failure = self._end_pipeline()
            if failure is not None:
                report_lost(failure, kept=kept)
            self._pruner.cancel(_END_S)
            self.release()
            self._ranks.drain(_END_S)
        except KeyboardInterrupt:
            if left := self._pipeline.under_way:
                report_lost(StoreError("interrupted", step=left[-1].saving.attempt.step), kept=kept)

    def refuse(self, tenure: Tenure, error: Exception, number: int) -> NoReturn:
        """Raise `error` in all ranks, because this rank cannot take the snapshot of a save."""
        with self._ranks.meeting(tenure.topic(number), self._config.flush_timeout_s):
            raise error

    # ── private helpers ──────────────────────────────────────────────────────────────────────────────────────

    def _plan(self, captured: Captured) -> None:
        if not self._rank.fits(captured):
            self._pipeline.wait_idle()  # Snapshots under way still have the old structure.
            self.forget_plan()
            self._rank.plan(captured)

    def _submit(self, snapshot: Snapshot) -> None:
        """Pass a filled slot to the threads; raise StoreError if the process cannot start a thread."""
        with self._pipeline.submitting(snapshot) as before:
            if not self._pipeline.running:
                start_thread(self._save_all, name="ckpt-flush")
                self._pipeline.running = True  # It stays True until no snapshot waits.
            self._work(start_thread(self._seal, snapshot, before, name="ckpt-seal"))

    def _work(self, worker: threading.Thread) -> None:
        self._workers = [*(before for before in self._workers if before.is_alive()), worker]

    def _seal(self, snapshot: Snapshot, before: Snapshot | None) -> None:
        self._pipeline.submitted()
        system().lower_priority()  # Not earlier: training has waited for the start of this thread.
        try:
            if snapshot.copy is not None:
                snapshot.copy.wait()
            if before is not None:
                before.known.wait()
            self._rank.seal(snapshot, before)
        except BaseException as error:  # noqa: BLE001 (the flush raises it, and the trainer takes it)
            snapshot.error = error
        finally:
            snapshot.digested.put(None)
            snapshot.known.set()
        # Allocate only after the seal: until then the other slot may hold the previous process's snapshot.
        if not (snapshot.lacks_seal or snapshot.given_up) and snapshot.saving.attempt.step:
            self._rank.take_ahead(next(slot for slot in SLOTS if slot != snapshot.slot))

    def _save_all(self) -> None:
        try:
            self._pipeline.submitted()
            system().lower_priority()
            while snapshots := self._pipeline.take():
                for snapshot in snapshots:
                    self._pipeline.ended(snapshot, self._outcome_of(snapshot))
        except BaseException as error:  # noqa: BLE001 (for example there is no memory: the trainer raises it)
            self._pipeline.broke(error)

    def _moved(self) -> None:
        self._pipeline.moved()
        self._watched()

    def _outcome_of(self, snapshot: Snapshot) -> Outcome:
        step = snapshot.saving.attempt.step
        try:
            with watching(self._moved):
                return Committed(self._save.run(snapshot))
        except SupersededError:
            return Superseded()
        except BaseException as error:  # noqa: BLE001 (kept for the trainer, who raises it)
            if isinstance(error, CkptError) and error.step is None:
                error.step = step
            if isinstance(error, Exception):
                self.listeners.failed(step, error)
            return Failed(error)

    def _end_pipeline(self) -> BaseException | None:
        failure = self._pipeline.end()
        for worker in self._workers:
            worker.join(self._config.flush_timeout_s)  # A thread inside torch would abort the interpreter.
        return failure

    def _warn_if_stuck(self, step: int) -> None:
        stuck = self._pipeline.stuck
        if stuck and not self._warned_stuck:
            _log.warning(
                "The store has taken nothing for %g s; step %d and later ones are kept in memory only",
                self._config.flush_timeout_s,
                step,
            )
        self._warned_stuck = stuck
