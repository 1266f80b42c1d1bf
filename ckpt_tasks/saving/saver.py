"""The saving half of a Checkpointer: from a live state to a committed checkpoint, most of it behind training's back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from ckpt_tasks.errors import CkptError, CommitUncertainError, ConfigError, FencedError, StoreError
from ckpt_tasks.format.keys import INDEX_NAME, MANIFEST_NAME, attempt_prefix
from ckpt_tasks.format.ledger import Checkpoint, Entry, Owner, State
from ckpt_tasks.format.seal import Seal
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.ledger.history import History, check_owner
from ckpt_tasks.ledger.metrics import checked_metrics
from ckpt_tasks.ledger.observing import LearningCadence
from ckpt_tasks.policy.cadence import SavePoint
from ckpt_tasks.reading.opening import open_checkpoint
from ckpt_tasks.saving import save as steps
from ckpt_tasks.saving.ending import end_with_interpreter, report_lost
from ckpt_tasks.saving.listening import Listeners
from ckpt_tasks.saving.pipeline import Pipeline, Snapshot
from ckpt_tasks.snapshot.cache import SnapshotCache
from ckpt_tasks.snapshot.device import Devices
from ckpt_tasks.snapshot.first import FirstCopy
from ckpt_tasks.snapshot.memory import SLOTS, Fill, MemoryDirectory, touch
from ckpt_tasks.snapshot.snapshot import Image, ImageSet, SnapshotPlan, plan_snapshot
from ckpt_tasks.state.capture import Captured
from ckpt_tasks.state.threads import lower_priority
from ckpt_tasks.storage.progress import moved
from ckpt_tasks.upkeep.pruning import Pruner

__all__ = ["Saver"]

_END_S = 5.0  # for a prune that follows the last commit to stop, and for threads that are within torch or Arrow
_log = logging.getLogger("ckpt_tasks")


class Saver:
    """Take snapshots and see to it that they are committed.

    `parent` is what the next checkpoint follows: restored from, or committed last; `known_n` the newest ledger entry
    known here to have committed a checkpoint; `cadence` the automatic one, from the first step on.
    """

    def __init__(self, history: History, config: CheckpointConfig, pruner: Pruner, cache: SnapshotCache):
        self.parent: Checkpoint | None = None
        self.last_commit: Checkpoint | None = None
        self.known_n = -1
        self.listeners = Listeners()
        self._history = history
        self._config = config
        self._pruner = pruner
        pruner.in_use = lambda: frozenset(one.base for one in self._pipeline.under_way if one.base is not None)
        self._owner: Owner | None = None
        self._run_key = ""
        self._cache = cache
        self.cadence: LearningCadence | None = None
        self._devices = Devices()
        self._plan: SnapshotPlan | None = None
        self._early = False  # the newest snapshot is of step 0: optimizers make their state in their first step
        self._sets: dict[str, ImageSet] = {}
        self._taking = threading.Lock()
        self._pipeline = Pipeline(self._seal, self._take_other, self._flush, config.flush_timeout_s)
        self._warned_stuck = False
        self._stored: tuple[str, steps.Stored] | None = None  # of which checkpoint, what

    def begin(self, owner: Owner, run_key: str) -> None:
        """Save as this owner from now on."""
        self._owner, self._run_key = owner, run_key
        end_with_interpreter(self)

    def due(self, last: SavePoint, now: SavePoint) -> bool:
        """Say whether a snapshot is due, by policy or by cadence."""
        if self._config.automatic and self.cadence is None:
            # Only here: a loop that reports no steps need not read the history.
            self.cadence = LearningCadence(self._history, self._config.overhead_cap)
        timely = self.cadence is not None and self.cadence.due(last, now)
        return timely or self._config.save_policy.due(last, now)

    @property
    def unprepared(self) -> bool:
        """Whether the memory for the next snapshot should be made ready: of the first, and of the first with a step."""
        return self._plan is None or (self._early and self._pipeline.idle)

    def check_line(self, owner: Owner) -> None:
        """Raise ConfigError where others have committed what this process does not know.

        It must not put a line of its own over theirs. Once is enough: a commit is the owner's alone.
        """
        state = self._history.head().state
        check_owner(state.owner, owner)
        if any(checkpoint.n > self.known_n for checkpoint in state.live):
            raise ConfigError(
                f"{self._history.store.url} holds checkpoints up to step {max(c.step for c in state.live)}",
                hint="Call restore() first, or use another directory.",
            )

    def snapshot(
        self,
        step: int,
        captured: Captured,
        groups: Mapping[str, Mapping[str, object]],
        *,
        metrics: Mapping[str, float],
        epochs: int | None,
        started_s: float,
        keep: bool,
        interim: bool = False,
        step_s: float | None = None,
    ) -> None:
        """Copy a captured state and hand it over; training has waited since `started_s` (perf_counter).

        `keep`: no newer snapshot may take its place. `interim` and `step_s` go into the ledger. What is on the
        host is copied when this returns; a device copies what it holds before anything that training queues from then
        on. Raises StoreError where there is no memory for it.
        """
        assert self._owner is not None
        saving = steps.Saving(
            attempt=steps.new_attempt(step, self._owner),
            run_key=self._run_key,
            owner=self._owner,
            groups=groups,
            metrics=checked_metrics(metrics),
            epochs=epochs,
            interim=interim,
        )
        slot = self._pipeline.take_slot()
        images, filled = self._images(slot, captured)
        self._early = step == 0
        self._cache.memory.unseal(slot)
        copy = None if filled else images.fill(captured.tensors, self._devices)
        stall_s = time.perf_counter() - started_s
        observed = {"stall_s": round(stall_s, 6)} | ({} if step_s is None else {"step_s": round(step_s, 6)})
        snapshot = Snapshot(
            slot=slot, saving=saving, images=images, stall_s=stall_s, keep=keep, observed=observed, copy=copy
        )
        try:
            self._pipeline.submit(snapshot)
        except BaseException:
            if copy is not None:  # nobody else waits for it, and the slot will be filled again
                copy.wait()
            raise
        self._warn_if_stuck(step)

    def prepare(self, captured: Captured) -> None:
        """Have the memory of the next snapshot made ready in the background.

        Memory that is touched for the first time costs several times a copy.
        """
        self._early = False
        self._replan(captured)
        threading.Thread(target=self._take_ahead, args=(self._pipeline.next_slot(),), name="ckpt-take").start()

    def wait(self) -> None:
        """Return when everything is committed; raise what went wrong, and StoreError where the store is stuck."""
        done = self._pipeline.wait()
        failure = self._pipeline.take_failure()
        if failure is not None:
            raise failure
        if not done:
            raise self._pipeline.stuck_error()

    def wait_idle(self) -> None:
        """Wait like `wait`, and leave what went wrong to whoever asks next."""
        self._pipeline.wait()

    def release(self) -> bool:
        """Release the run directory; False where the store is stuck, and would not take that either."""
        if self._pipeline.stuck:
            return False
        owner, self._owner, gone = self._owner, None, self._pruner.deleted
        with suppress(StoreError, CommitUncertainError):  # the next owner sees that this process is gone, or silent
            try:
                if owner is not None:
                    self._history.append({"kind": "release"}, lambda state, n: state.released(gone), owner=owner)
            except FencedError:
                self._cache.close(keep=False)  # what a fenced process has in memory is no part of the run
        return True

    def end(self) -> None:
        """Commit the last snapshot and release the run at the interpreter's end; say what is not committed."""
        kept = isinstance(self._cache.memory, MemoryDirectory) or self._cache.copies is not None
        try:
            self._pruner.cancel(0)
            done = self._pipeline.end()
            failure = self._pipeline.take_failure()
            if failure is not None or not done:
                report_lost(failure or self._pipeline.stuck_error(), kept=kept)
            self._pruner.cancel(_END_S)
            self.release()
        except KeyboardInterrupt:
            if left := self._pipeline.under_way:
                report_lost(StoreError("interrupted", step=left[-1].saving.attempt.step), kept=kept)

    def take_failure(self) -> BaseException | None:
        """Return what went wrong with an earlier snapshot, once; nothing is waited for."""
        return self._pipeline.take_failure()

    def raise_failure(self) -> None:
        """Raise what went wrong with an earlier snapshot; a failed flush only if the configuration says so."""
        failure = self.take_failure()
        if failure is None:
            return
        if self._config.on_flush_failure == "raise" or not isinstance(failure, StoreError):
            raise failure
        _log.warning("A checkpoint could not be saved; training goes on: %s", failure)
        event = {"kind": "note", "note": "flush_failed", "step": failure.step, "why": str(failure)[:2000]}
        self._pruner.unnoted.append(event)  # the history has it once the store takes a checkpoint again

    def restored(self, slot: str | None) -> None:
        """Leave the slot that was restored from for as long as possible."""
        self._pipeline.hold(slot)

    def forget_plan(self) -> None:
        """Let the images go: they are taken anew by the next snapshot. Nothing may be on its way."""
        self._pipeline.forget()
        with self._taking:
            self._plan = None
            self._sets.clear()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _images(self, slot: str, captured: Captured) -> tuple[ImageSet, bool]:
        """Return a slot's images, and whether they have been filled as they were made."""
        plan = self._replan(captured)
        first = FirstCopy(plan, captured.tensors)
        with self._taking:
            return self._take(slot, plan, first.write), first.done

    def _replan(self, captured: Captured) -> SnapshotPlan:
        """Return the plan for a structure: the one at hand, unless that is for another one."""
        if self._plan is None or not self._plan.fits(captured.tensors, captured.frozen):
            self._pipeline.wait()  # what is on its way still has the old structure
            self.forget_plan()
            self._plan = plan_snapshot(captured.tensors, captured.frozen)
            self._cache.make_room(sum(self._plan.sizes.values()))
        return self._plan

    def _take(self, slot: str, plan: SnapshotPlan, fill: Fill | None = None) -> ImageSet:
        """Return a slot's images, made if need be; for whoever holds `_taking`."""
        found = self._sets.get(slot)
        if found is None:
            found = self._sets[slot] = ImageSet(plan, self._cache.take(slot, plan.sizes, fill))
            for image in found.images:
                if image.name in plan.devices:
                    self._devices.pin(image.buffer, image, plan.devices[image.name])
        return found

    def _take_ahead(self, slot: str) -> None:
        lower_priority()
        found: tuple[Image, ...] = ()
        with suppress(CkptError), self._taking:  # the snapshot that needs it will say what is wrong
            if (plan := self._plan) is not None:  # it may have been forgotten, or another one be there by now
                found = self._take(slot, plan).images
        for image in found:
            touch(image.buffer, lambda: self._plan is plan)

    def _seal(self, snapshot: Snapshot, before: Snapshot | None) -> None:
        with self._pruner.retiring:
            parent = self.parent
            snapshot.base = parent.manifest_digest if parent is not None else None
        base = self._stored_of(parent)
        found: list[steps.RankPart] = []
        for image in snapshot.images.images:
            part = steps.digest_image(snapshot.saving.attempt, image, lambda: snapshot.given_up)
            found.append(steps.reuse(part, base))
            snapshot.digested.put((part, found[-1]))  # the flush has been waiting for it
        prepared = steps.prepare_checkpoint(snapshot.saving, [steps.joined(found)])
        in_flight = before.prepared.digest if before is not None and before.prepared is not None else None
        seal = self._seal_of(snapshot, prepared, in_flight)
        snapshot.prepared = prepared
        files = {INDEX_NAME: prepared.index_bytes, MANIFEST_NAME: prepared.manifest_bytes}
        try:
            self._cache.memory.seal(snapshot.slot, files, seal.to_bytes())
        except StoreError as error:
            _log.warning("Step %d will not survive this process in memory: %s", snapshot.saving.attempt.step, error)

    def _seal_of(self, snapshot: Snapshot, prepared: steps.PreparedCheckpoint, in_flight: str | None) -> Seal:
        newest = self.parent.manifest_digest if self.parent else None
        return Seal(
            run_key=snapshot.saving.run_key,
            checkpoint=prepared.checkpoint(parent=newest, n=-1, cost_s=snapshot.stall_s),
            newest=newest,
            in_flight=in_flight,
        )

    def _take_other(self, snapshot: Snapshot) -> None:
        # Only once a snapshot is sealed: until then the other slot may hold the last process's.
        if not snapshot.given_up and snapshot.saving.attempt.step:
            self._take_ahead(next(slot for slot in SLOTS if slot != snapshot.slot))

    def _flush(self, snapshot: Snapshot) -> None:
        try:
            entry = self._save(snapshot)
        except steps.SupersededError:
            raise  # a newer snapshot takes its place: nothing has failed
        except Exception as error:
            if isinstance(error, CkptError) and error.step is None:
                error.step = snapshot.saving.attempt.step
            self.listeners.failed(snapshot.saving.attempt.step, error)
            raise
        saved = entry.state.live[-1]
        self.last_commit = self.parent = saved
        self.known_n = saved.n
        self.listeners.committed(saved, time.monotonic() - snapshot.taken_s)
        if self.cadence is not None:
            self.cadence.learn(entry)
        if self._cache.copies is not None:
            self._cache.copies.retain(entry.state.live)
        self._pruner.follow(snapshot.saving.owner, entry.state)

    def _save(self, snapshot: Snapshot) -> Entry:
        """Write a snapshot and commit it."""
        head = self._history.head()
        state = head.state.sparing(head.spared_epochs)
        check_owner(state.owner, snapshot.saving.owner)  # who was fenced writes nothing more
        try:
            self._copy(snapshot)
            prepared = self._write(snapshot, state)
        except CkptError:
            with suppress(StoreError):  # a new owner sweeps what it finds of ours: then that is the reason
                check_owner(self._history.head().state.owner, snapshot.saving.owner)
            steps.discard(self._history.store, snapshot.saving.attempt)
            raise
        superseded = self._pipeline.superseded
        parent = self.parent.manifest_digest if self.parent else None
        new = prepared.checkpoint(parent=parent, n=head.next_n, cost_s=snapshot.stall_s)
        retirement = self._pruner.with_commit(state, new)
        flush_s = round(time.monotonic() - snapshot.taken_s, 6)
        observed = {**snapshot.observed, "flush_s": flush_s, **({"superseded": superseded} if superseded else {})}
        entry = steps.commit(
            self._history, prepared, parent=parent, cost_s=snapshot.stall_s, retirement=retirement, observed=observed
        )
        self._pipeline.told(superseded)
        self._pruner.deleted -= retirement.deleted
        self._stored = (
            entry.state.live[-1].manifest_digest,
            steps.Stored.of(prepared.manifest.objects, prepared.rows),
        )
        return entry

    def _copy(self, snapshot: Snapshot) -> None:
        """Write the snapshot to the local directory, where there is one; what fails there is said, and no more."""
        copies = self._cache.copies
        if copies is None:
            return
        prepared = snapshot.wait_prepared()
        images = {image.name: image.bytes for image in snapshot.images.images}
        objects = {one.name: images[one.name.rpartition("/")[2]] for one in prepared.manifest.objects}
        index = prepared.manifest.index.name, prepared.index_bytes
        try:
            copies.write(objects, index, prepared.manifest_bytes, self._seal_of(snapshot, prepared, None))
        except StoreError as error:
            _log.warning("Step %d has no copy in the local directory: %s", snapshot.saving.attempt.step, error)

    def _write(self, snapshot: Snapshot, state: State) -> steps.PreparedCheckpoint:
        store, prefix = self._history.store, attempt_prefix(snapshot.saving.attempt)
        parts, as_planned = [], True
        for image in snapshot.images.images:
            digested = snapshot.digested.get()
            if digested is None:
                break  # the description says what went wrong
            moved()
            part, found = digested
            if not state.keeps(found.objects[0].name):
                as_planned = as_planned and found is part
                found = part
                store.put(prefix + image.name, [image.bytes])
            parts.append(found)
        prepared = snapshot.wait_prepared()
        if not as_planned:  # an object that was to be reused has been given up since
            prepared = steps.prepare_checkpoint(snapshot.saving, [steps.joined(parts)])
        steps.write_index_and_manifest(store, prepared)
        return prepared

    def _stored_of(self, parent: Checkpoint | None) -> steps.Stored | None:
        """Return what the checkpoint before is made of; None where there is none, or it cannot be read."""
        if parent is None:
            return None
        if self._stored is None or self._stored[0] != parent.manifest_digest:
            try:
                opened = open_checkpoint(self._history.store, parent)
            except CkptError:
                return None  # everything is written then
            self._stored = parent.manifest_digest, steps.Stored.of(opened.manifest.objects, opened.rows)
        return self._stored[1]

    def _warn_if_stuck(self, step: int) -> None:
        stuck = self._pipeline.stuck
        if stuck and not self._warned_stuck:
            _log.warning(
                "The store has taken nothing for %.0f s; step %d and later ones are kept in memory only",
                self._config.flush_timeout_s,
                step,
            )
        self._warned_stuck = stuck
