"""Saves in the background: training waits only for `snapshot`; threads seal, write and commit the copy.

A save is the same for one rank and for many (`_save`): each rank writes its part, rank 0 commits all parts, and then
every rank continues from the new checkpoint. A single rank gathers only its own part, and receives its own answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NoReturn

from ckpt_tasks.checkpoint.extension import Extension, Extensions
from ckpt_tasks.checkpoint.memory.cache import SnapshotCache
from ckpt_tasks.checkpoint.memory.memory import SLOTS
from ckpt_tasks.checkpoint.memory.snapshot import Image
from ckpt_tasks.checkpoint.ranks.exchange import ALONE, Exchange
from ckpt_tasks.checkpoint.save.ending import report_lost
from ckpt_tasks.checkpoint.save.listening import Listeners
from ckpt_tasks.checkpoint.save.parts import CHECKPOINT, PART, RankPart, Saving, Stored, same_step
from ckpt_tasks.checkpoint.save.pipeline import Committed, Failed, Outcome, Pipeline, Snapshot, Superseded
from ckpt_tasks.checkpoint.save.pruning import Pruner
from ckpt_tasks.checkpoint.save.rank_saver import RankSaver
from ckpt_tasks.checkpoint.save.schedule import SaveSchedule
from ckpt_tasks.checkpoint.save.tenure import Spent, Tenure
from ckpt_tasks.errors import CkptError, FencedError, StateError, StoreError
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.process import start_thread
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import Head, History
from ckpt_tasks.state.kinds.group_parts import Captured
from ckpt_tasks.storage.port import moved, watching
from ckpt_tasks.system import system

_END_S = 5.0  # At the end, wait this long for a prune to stop, and for other ranks to read rank 0's answers.
_log = logging.getLogger("ckpt_tasks")


class Writer(Pipeline):
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
        super().__init__(config.flush_timeout_s)
        self.listeners = Listeners()
        self.tenure: Tenure | None = None
        self._ranks = ranks
        self._history = history
        self._config = config
        self._cache = cache
        self._pruner = pruner
        self._schedule = schedule
        self._extensions = extensions
        self._rank = RankSaver(cache, ranks.rank, ranks.size, extensions.at(Extension.digested))
        self._workers: list[threading.Thread] = []  # These threads seal snapshots, or allocate memory.
        self._early = False  # True if memory was prepared before a step; this step may change the state's structure.
        self._turn = system().lock()

    @property
    def unprepared(self) -> bool:
        """Whether to prepare memory for the next snapshot: there is none, or a step may have changed the structure."""
        return not self._rank.is_planned or (self._early and self.idle)

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
        following = self.next_slot()
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
        spent: Spent,
    ) -> Snapshot | None:
        """Copy a captured state and submit it; training has waited since `started_s`.

        `keep`: no newer snapshot may replace this one. `spent`: the time of the steps, for the ledger. Host
        tensors are copied on return; device tensors are copied before any device work that training queues later.
        Raises StoreError if there is no memory. If no slot may be filled, copies nothing, keeps the failure for
        `take_failure`, and returns None.
        """
        try:
            slot = self.take_slot()
        except StoreError as error:
            error.step = saving.attempt.step
            self.fail(error)
            with suppress(CkptError):
                self.refuse(tenure, error, saving.number)
            return None
        try:
            self._plan(captured)
            compared = self._rank.sample(captured, saving)
            images, copy = self._rank.fill(slot, captured)
            files = [file for group in captured.files for file in group.take()]
        except StoreError as error:
            self.refuse(tenure, error, saving.number)
        self._early = saving.attempt.step == 0
        stall_s = system().monotonic() - started_s
        snapshot = Snapshot(
            slot=slot,
            tenure=tenure,
            saving=saving,
            images=images,
            stall_s=stall_s,
            keep=keep,
            spent=spent,
            copy=copy,
            compared=compared,
            files=files,
        )
        self.warn_if_stuck(saving.attempt.step)
        try:
            self._submit(snapshot)  # Do this last: the threads that it starts could delay a later statement.
        except BaseException as error:
            if copy is not None:  # No thread waits for the copy, and the slot will be refilled.
                copy.wait()
            if isinstance(error, StoreError):
                self.refuse(tenure, error, saving.number)
            raise
        return snapshot

    def wait(self) -> None:
        """Wait until every snapshot is committed; raise the first failure, or StoreError if the store is stuck."""
        self.listeners.check()
        failure = self.ended_with()
        if failure is not None:
            raise failure

    def wait_idle(self) -> bool:
        """Wait until no snapshot is under way; return False if the store is stuck; keep a failure for a later call."""
        self.listeners.check()
        return self.await_idle()

    @property
    def images(self) -> Mapping[str, Sequence[Image]]:
        """The files of each slot that has memory; takes no lock, so a forked child may call it."""
        return self._rank.images

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

    def forget_plan(self) -> None:
        """Drop the plan and the images; the next snapshot makes new ones. No snapshot may be under way."""
        self.forget_snapshots()
        self._rank.forget()

    def turn(self) -> AbstractContextManager[Any]:
        """Return the lock of saving and closing: only one thread at a time may do either.

        When the interpreter exits, the main thread takes no lock, and daemon threads wait for the lock until Python
        stops them.
        """
        self.listeners.check()
        ends = self.has_ended and threading.current_thread() is threading.main_thread()
        return nullcontext() if ends else self._turn

    def release(self) -> bool:
        """Release the run directory; return False if the store is stuck and cannot take the release."""
        if self.stuck:
            return False
        tenure, self.tenure = self.tenure, None
        if tenure is not None and not tenure.release():
            self._cache.close(keep=False)  # A fenced process's memory is not part of the run.
        return True

    def finish(self) -> None:
        """Commit the saves under way of a garbage-collected Checkpointer, and release its memory for the next one."""
        failure = self._end_all()
        if failure is not None:
            _log.warning("The last snapshot was not committed: %s", failure)
        self._pruner.cancel(_END_S)
        self._cache.close(keep=True)

    def end(self) -> None:
        """When the interpreter exits, commit the last snapshot and release the run; report lost steps."""
        kept = self._cache.outlives or self._extensions.tell(Extension.keeps_in) is not None
        try:
            self._pruner.cancel(0)
            # A daemon thread may be taking a snapshot that replaces the previous one: wait until it has submitted the
            # snapshot, or neither is committed. A later daemon thread waits for the lock until Python stops it.
            self._turn.acquire(timeout=self._config.flush_timeout_s)
            failure = self._end_all()
            if failure is not None:
                report_lost(failure, kept=kept)
            self._pruner.cancel(_END_S)
            self.release()
            self._ranks.drain(_END_S)
        except KeyboardInterrupt:
            if left := self.under_way:
                report_lost(StoreError("interrupted", step=left[-1].saving.attempt.step), kept=kept)

    def refuse(self, tenure: Tenure, error: Exception, number: int) -> NoReturn:
        """Raise `error` in all ranks, because this rank cannot take the snapshot of a save."""
        with self._ranks.meeting(tenure.topic(number), self._config.flush_timeout_s):
            raise error

    def _plan(self, captured: Captured) -> None:
        if not self._rank.fits(captured):
            self.await_idle()  # Snapshots under way still have the old structure.
            self.forget_plan()
            self._rank.plan(captured)

    def _submit(self, snapshot: Snapshot) -> None:
        """Pass a filled slot to the threads; raise StoreError if the process cannot start a thread."""
        with self.submitting(snapshot) as before:
            if not self.running:
                start_thread(self._save_all, name="ckpt-flush")
                self.running = True  # It stays True until no snapshot waits.
            self._work(start_thread(self._seal, snapshot, before, name="ckpt-seal"))

    def _work(self, worker: threading.Thread) -> None:
        self._workers = [*(before for before in self._workers if before.is_alive()), worker]

    def _seal(self, snapshot: Snapshot, before: Snapshot | None) -> None:
        self.submitted()
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
            self.submitted()
            system().lower_priority()
            while snapshots := self.take():
                for snapshot in snapshots:
                    self.ended(snapshot, self._outcome_of(snapshot))
        except BaseException as error:  # noqa: BLE001 (for example there is no memory: the trainer raises it)
            self.broke(error)

    def _outcome_of(self, snapshot: Snapshot) -> Outcome:
        step = snapshot.saving.attempt.step
        try:
            with watching(self.moved):
                return self._save(snapshot)
        except BaseException as error:  # noqa: BLE001 (kept for the trainer, who raises it)
            if isinstance(error, CkptError) and error.step is None:
                error.step = step
            if isinstance(error, Exception):
                self.listeners.failed(step, error)
            return Failed(error)

    def _save(self, snapshot: Snapshot) -> Committed | Superseded:
        """Write this rank's part of a snapshot, and commit it with the parts of all ranks.

        Returns Superseded if a rank already has a newer snapshot; raises an error of any rank in all ranks. After an
        error nothing is committed.
        """
        topic, part, parts, entry = snapshot.tenure.topic(snapshot.saving.number), None, [], None
        try:
            # An error in one rank is raised in all; if another process has taken the run, FencedError replaces it.
            with self._ranks.meeting(topic, self._config.flush_timeout_s) as ranks, snapshot.tenure.owning():
                part, admitted = self._written(snapshot)
                parts = ranks.gather(part, *PART)
                if admitted is not None and all(parts):  # Rank 0 has all parts, and none was replaced.
                    entry = self._commit(snapshot, admitted, parts)
                done = ranks.publish(_checkpoint_of(entry), *CHECKPOINT)
        except CkptError as error:
            if (done := _checkpoint_of(entry)) is None:
                self._failed(snapshot, error)
                raise
            # The entry exists: the save is committed, although not all ranks know this.
        if done is None or part is None:
            if snapshot.tenure.committer is not None and any(parts):  # All ranks have answered: no rank writes now.
                snapshot.tenure.committer.abandon(snapshot.saving.attempt)
            return Superseded()
        self._follow(snapshot, done, part, entry)
        return Committed(done)

    def _written(self, snapshot: Snapshot) -> tuple[RankPart | None, tuple[Head, State] | None]:
        """Write this rank's new objects; return its part, and in rank 0 also the ledger's head and state.

        The part names unchanged objects of the last checkpoint again. The part is None if a newer snapshot has replaced
        this one.
        """
        committer, line, store = snapshot.tenure.committer, snapshot.tenure.line, self._history.store
        admitted = None
        try:
            if snapshot.given_up:
                return None, None  # The snapshot's slot is being refilled.
            if committer is not None:
                admitted = committer.admit()  # A fenced process must not write.
                state, size = admitted[1], self._rank.size.of_ranks(self._ranks.size)
                self._extensions.tell(Extension.admitted, state, size)
                committer.hold_base()
            stored = line.reusable(store)
            if stored is not None and admitted is not None:
                stored = stored.kept(admitted[1].keeps)
            return self._rank.write(store, snapshot, stored), admitted
        finally:
            snapshot.patience = self._ranks.patience
            moved()

    def _commit(self, snapshot: Snapshot, admitted: tuple[Head, State], parts: list[RankPart | None]) -> Entry:
        """Commit the parts of all ranks: the ledger entry creates the checkpoint."""
        run, began_s, cost_s = snapshot.tenure, snapshot.taken_s, snapshot.stall_s
        assert run.committer is not None  # This is rank 0.
        present = same_step([part for part in parts if part is not None])
        more = {"superseded": [*snapshot.superseded], "failed_saves": run.failed_saves, **run.resume.untold()}
        observed: dict[str, object] = {"stall_s": round(cost_s, 6), **snapshot.spent.since(run.line.spent)}
        observed |= {name: value for name, value in more.items() if value}
        commit = partial(run.committer.commit, observed=observed, began_s=began_s, cost_s=cost_s)
        entry, _ = commit(admitted, snapshot.saving, present, sealed=snapshot.sealed)
        run.resume.tell(observed)
        run.failed_saves = 0
        for attached in snapshot.saving.attached:
            attached.committed(self.listeners)
        return entry

    def _failed(self, snapshot: Snapshot, error: CkptError) -> None:
        """Remove everything of a save that failed in this or another rank, except the snapshot in memory."""
        tenure, attempt = snapshot.tenure, snapshot.saving.attempt
        tenure.failed_saves += 1
        tenure.fenced = tenure.fenced or isinstance(error, FencedError)
        if type(error) is StateError:  # The ranks' states do not fit together: no rank may restore the snapshot.
            snapshot.unsealed = True
            self._rank.refuse(snapshot.slot)
            self._extensions.tell(Extension.refused, attempt)
        if tenure.committer is None:
            tenure.line.unsure = True
        else:
            tenure.committer.abandon(attempt)

    def _follow(self, snapshot: Snapshot, checkpoint: Checkpoint, part: RankPart, entry: Entry | None) -> None:
        """Continue from the new checkpoint: call listeners, learn its cost, and prune older checkpoints."""
        tenure = snapshot.tenure
        for file in snapshot.files:
            file.committed(checkpoint.manifest_digest)
        tenure.line.committed(checkpoint, Stored.of(part.objects, part.index))
        tenure.line.spent = snapshot.spent
        self._cache.forget_left()
        self.listeners.committed(checkpoint, system().monotonic() - snapshot.taken_s)
        if tenure.committer is not None and entry is not None:
            self._schedule.learn(entry)
            tenure.committer.prune_behind(entry)

    def _end_all(self) -> BaseException | None:
        failure = self.end_queue()
        for worker in self._workers:
            worker.join(self._config.flush_timeout_s)  # A thread inside torch would abort the interpreter.
        return failure


def _checkpoint_of(entry: Entry | None) -> Checkpoint | None:
    return entry.state.live[-1] if entry is not None else None
