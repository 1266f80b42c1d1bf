"""The way of a save, from a captured state to a commit: the rank's half, then the committer's, in the background.

Training waits for `snapshot` only. `_seal` and `_flush` run in the pipeline's threads.
"""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NoReturn

from ckpt_tasks.errors import CkptError, StoreError
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.ledger.history import Head, History
from ckpt_tasks.ranks.exchange import ALONE, Exchange
from ckpt_tasks.saving.commit import PreparedCheckpoint, prepare_checkpoint
from ckpt_tasks.saving.committer import Committer, Follower
from ckpt_tasks.saving.ending import report_lost
from ckpt_tasks.saving.joint_save import JointSave
from ckpt_tasks.saving.listening import Listeners
from ckpt_tasks.saving.parts import RankPart, Saving, Stored, SupersededError, joined
from ckpt_tasks.saving.pipeline import Committed, Failed, Pipeline, Snapshot
from ckpt_tasks.saving.rank_saver import RankSaver
from ckpt_tasks.saving.schedule import SaveSchedule
from ckpt_tasks.snapshot.cache import SnapshotCache
from ckpt_tasks.snapshot.memory import SLOTS
from ckpt_tasks.state.restore_parts import Captured
from ckpt_tasks.system import system
from ckpt_tasks.upkeep.pruning import Pruner

__all__ = ["Saver"]

_END_S = 5.0  # time to stop for the prune after the last commit, and for threads inside torch or Arrow
_log = logging.getLogger("ckpt_tasks")


class Saver:
    """Take snapshots of the state and commit them in the background.

    `committer` belongs to the present ownership and is released at the interpreter's end. Every snapshot is committed
    by the committer that it was taken with.
    """

    def __init__(
        self,
        history: History,
        config: CheckpointConfig,
        cache: SnapshotCache,
        pruner: Pruner,
        schedule: SaveSchedule,
        *,
        ranks: Exchange = ALONE,
    ):
        self.listeners = Listeners()
        self.committer: Committer | Follower | None = None
        self._ranks = ranks
        self._history = history
        self._config = config
        self._cache = cache
        self._pruner = pruner
        self._schedule = schedule
        self._rank = RankSaver(cache, ranks.rank, ranks.size)
        self._joint = JointSave(
            ranks, self._rank, history, cache, deadline_s=config.flush_timeout_s, commit_entry=self._commit
        )
        self._pipeline = Pipeline(
            self._seal, self._take_other, self._flush, config.flush_timeout_s, tells_superseded=ranks.size > 1
        )
        pruner.in_use = lambda: frozenset(s.base for s in self._pipeline.under_way if s.base is not None)
        self._early = False  # the newest snapshot is of step 0: an optimizer will create its state in step 1
        self._warned_stuck = False
        self._turn = system().lock()

    @property
    def unprepared(self) -> bool:
        """Whether to prepare memory for the next snapshot: before the first one, and after the one of step 0."""
        return not self._rank.is_planned or (self._early and self._pipeline.idle)

    def prepare(self, captured: Captured) -> None:
        """Prepare the memory of the next snapshot in the background."""
        self._early = False
        self._plan(captured)
        system().start_thread(self._rank.take_ahead, self._pipeline.next_slot(), name="ckpt-take", daemon=False)

    def snapshot(
        self,
        committer: Committer | Follower,
        saving: Saving,
        captured: Captured,
        *,
        started_s: float,
        keep: bool,
        step_s: float | None = None,
    ) -> Snapshot | None:
        """Copy a captured state and submit it; training has waited since `started_s`.

        `keep`: no newer snapshot may replace it. `step_s` goes into the ledger. On return host tensors are copied; a
        device copies its tensors before any work that training queues later. Raises StoreError if there is no memory.
        If no slot may be filled, returns None: nothing is copied, and the failure is kept as that of a flush is.
        """
        try:
            slot = self._pipeline.take_slot()
        except StoreError as error:
            error.step = saving.attempt.step
            self._pipeline.fail(error)
            with suppress(CkptError):
                self.refuse(committer, error, saving.number)
            return None
        try:
            self._plan(captured)
            compared = self._rank.sample(captured, saving)
            images, copy = self._rank.fill(slot, captured)
        except StoreError as error:
            self.refuse(committer, error, saving.number)
        self._early = saving.attempt.step == 0
        stall_s = system().monotonic() - started_s
        observed = {"stall_s": round(stall_s, 6)} | ({} if step_s is None else {"step_s": round(step_s, 6)})
        snapshot = Snapshot(
            slot=slot,
            committer=committer,
            saving=saving,
            images=images,
            stall_s=stall_s,
            keep=keep,
            observed=observed,
            copy=copy,
            compared=compared,
        )
        self._warn_if_stuck(saving.attempt.step)
        try:
            self._pipeline.submit(snapshot)  # last: whatever waits after it waits for what the threads compute
        except BaseException:
            if copy is not None:  # no thread waits for the copy, and the slot will be filled again
                copy.wait()
            raise
        return snapshot

    def checkpoint_of(self, snapshot: Snapshot | None) -> Checkpoint:
        """Return what a snapshot became once `wait` has returned; raise its failure, if another thread was told it."""
        outcome = snapshot.outcome if snapshot is not None else None
        if isinstance(outcome, Committed):
            return outcome.checkpoint
        raise outcome.error if isinstance(outcome, Failed) else StoreError("another thread was told why it failed")

    def wait(self) -> None:
        """Wait until every snapshot is committed; raise the first failure, StoreError if the store is stuck."""
        self.listeners.check()
        failure = self._pipeline.wait()
        if failure is not None:
            raise failure

    def wait_idle(self) -> None:
        """Wait until no snapshot is under way or the store is stuck; keep the failure."""
        self.listeners.check()
        self._pipeline.wait_idle()

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
        _log.warning("A checkpoint could not be saved; training goes on: %s", failure)
        event = {"kind": "note", "note": "flush_failed", "step": failure.step, "why": str(failure)[:2000]}
        self._pruner.unnoted.append(event)  # written to the history once the store takes a checkpoint again

    def restored(self, slot: str | None, *, lacks: bool = False) -> None:
        """Fill the slot that was restored from only after the other one; `lacks`: storage does not have it."""
        self._pipeline.hold(slot, lacks=lacks)

    def forget_plan(self) -> None:
        """Forget the plan and the images; the next snapshot makes them anew. No snapshot may be under way."""
        self._pipeline.forget()
        self._rank.forget()

    def turn(self) -> AbstractContextManager[Any]:
        """Return the lock that a training thread and a closing thread take in turn.

        At the interpreter's end the main thread takes none, and daemon threads wait for it until they are stopped.
        """
        self.listeners.check()
        ends = self._pipeline.has_ended and threading.current_thread() is threading.main_thread()
        return nullcontext() if ends else self._turn

    def release(self) -> bool:
        """Release the run directory; return False if the store is stuck and cannot take the release."""
        if self._pipeline.stuck:
            return False
        committer, self.committer = self.committer, None
        if committer is not None and not committer.release():
            self._cache.close(keep=False)  # the memory of a fenced process is not part of the run
        return True

    def finish(self) -> None:
        """Commit what a Checkpointer that is gone has under way, and release its memory for the next one."""
        failure = self._pipeline.end()
        if failure is not None:
            _log.warning("The last snapshot was not committed: %s", failure)
        self._pruner.cancel(_END_S)
        self._cache.close(keep=True)

    def end(self) -> None:
        """Commit the last snapshot and release the run at the interpreter's end; report what is lost."""
        kept = self._cache.outlives
        try:
            self._pruner.cancel(0)
            # A daemon thread that is taking a snapshot submits it first: the one before may have made way for it. The
            # next one waits for its turn until Python stops it.
            self._turn.acquire(timeout=self._config.flush_timeout_s)
            failure = self._pipeline.end()
            if failure is not None:
                report_lost(failure, kept=kept)
            self._pruner.cancel(_END_S)
            self.release()
            self._ranks.drain(_END_S)
        except KeyboardInterrupt:
            if left := self._pipeline.under_way:
                report_lost(StoreError("interrupted", step=left[-1].saving.attempt.step), kept=kept)

    def refuse(self, committer: Committer | Follower, error: Exception, number: int) -> NoReturn:
        """Raise `error` in all ranks: this one cannot take the snapshot of a save."""
        self._ranks.agree(committer.topic(number), error, b"".join, self._config.flush_timeout_s)
        raise error

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _plan(self, captured: Captured) -> None:
        if not self._rank.fits(captured):
            self._pipeline.wait_idle()  # snapshots under way still have the old structure
            self.forget_plan()
            self._rank.plan(captured)

    def _seal(self, snapshot: Snapshot, before: Snapshot | None) -> None:
        if self._ranks.size > 1:
            self._joint.seal(snapshot, before)
            return
        committer, attempt = snapshot.committer, snapshot.saving.attempt
        assert isinstance(committer, Committer)
        with committer.choosing_base() as base:
            snapshot.base = base.manifest_digest if base is not None else None
        parts: list[RankPart] = []
        stored = committer.line.stored_of(self._history.store, base)
        for digested in self._rank.digest(attempt, snapshot.images, stored, lambda: snapshot.given_up):
            parts.append(digested[1])
            snapshot.digested.put(digested)  # the flush waits for it
        prepared = prepare_checkpoint(snapshot.saving, [joined(parts)])
        in_flight = before.prepared.digest if before is not None and before.prepared is not None else None
        seal = snapshot.seal_of(prepared, in_flight)
        snapshot.prepared = prepared
        snapshot.unsealed = not self._rank.seal(snapshot.slot, prepared, seal)

    def _take_other(self, snapshot: Snapshot) -> None:
        # Only after a seal: until then the other slot may hold the previous process's snapshot.
        if not snapshot.given_up and snapshot.saving.attempt.step:
            self._rank.take_ahead(next(slot for slot in SLOTS if slot != snapshot.slot))

    def _flush(self, snapshot: Snapshot) -> Checkpoint:
        step = snapshot.saving.attempt.step
        try:
            checkpoint, entry = self._commit_alone(snapshot) if self._ranks.size == 1 else self._joint.commit(snapshot)
        except SupersededError:
            raise  # not a failure
        except Exception as error:
            if isinstance(error, CkptError) and error.step is None:
                error.step = step
            self.listeners.failed(step, error)
            raise
        self._cache.forget_left()
        self.listeners.committed(checkpoint, system().monotonic() - snapshot.taken_s)
        if self._cache.copies is not None:  # of many ranks, only rank 0 knows what else is live
            self._cache.copies.retain(entry.state.live if entry and self._ranks.size == 1 else [checkpoint])
        if entry is not None and isinstance(snapshot.committer, Committer):
            self._schedule.learn(entry)
            snapshot.committer.prune_behind(entry)
        return checkpoint

    def _commit_alone(self, snapshot: Snapshot) -> tuple[Checkpoint, Entry]:
        committer, attempt = snapshot.committer, snapshot.saving.attempt
        assert isinstance(committer, Committer)
        admitted = committer.admit(self._rank.size)  # a fenced process must not write
        _, state = admitted
        try:
            if (copies := self._cache.copies) is not None:
                prepared = snapshot.wait_prepared()
                self._rank.copy(copies, snapshot.images, prepared, snapshot.seal_of(prepared, None))
            digested = iter(snapshot.digested.get, None)
            part, as_planned = self._rank.put(
                self._history.store, attempt, snapshot.images, digested=digested, keeps=state.keeps
            )
            prepared = snapshot.wait_prepared()
            if not as_planned:  # an object that should be reused has been retired since
                prepared = prepare_checkpoint(snapshot.saving, [part])
            committer.put_manifest(prepared)
        except CkptError:
            committer.abandon(attempt)
            raise
        entry = self._commit(
            committer, snapshot, admitted, prepared, Stored.of(prepared.manifest.objects, prepared.index)
        )
        return entry.state.live[-1], entry

    def _commit(
        self,
        committer: Committer,
        snapshot: Snapshot,
        admitted: tuple[Head, State],
        prepared: PreparedCheckpoint,
        stored: Stored,
    ) -> Entry:
        superseded = self._pipeline.superseded
        flush_s = round(system().monotonic() - snapshot.taken_s, 6)
        observed = {**snapshot.observed, "flush_s": flush_s, **({"superseded": superseded} if superseded else {})}
        entry, steps = committer.commit(admitted, prepared, stored=stored, cost_s=snapshot.stall_s, observed=observed)
        self._pipeline.forget_superseded(superseded)
        if steps:
            self.listeners.measured(steps)
        return entry

    def _warn_if_stuck(self, step: int) -> None:
        stuck = self._pipeline.stuck
        if stuck and not self._warned_stuck:
            _log.warning(
                "The store has taken nothing for %g s; step %d and later ones are kept in memory only",
                self._config.flush_timeout_s,
                step,
            )
        self._warned_stuck = stuck
