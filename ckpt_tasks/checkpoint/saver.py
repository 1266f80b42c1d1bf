"""The saving half of a Checkpointer: from a live state to a committed checkpoint, most of it behind training's back."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress

import torch

from ckpt_tasks.checkpoint import save as steps
from ckpt_tasks.checkpoint.config import CheckpointConfig
from ckpt_tasks.checkpoint.generations import Generations
from ckpt_tasks.checkpoint.history import History, check_owner
from ckpt_tasks.checkpoint.pipeline import Pipeline, Snapshot
from ckpt_tasks.checkpoint.pruning import Pruner
from ckpt_tasks.errors import CkptError, CommitUncertainError, ConfigError, StoreError
from ckpt_tasks.format.keys import INDEX_NAME, MANIFEST_NAME
from ckpt_tasks.format.ledger import Checkpoint, Owner
from ckpt_tasks.format.seal import Seal
from ckpt_tasks.state.snapshot import ImageSet, SnapshotPlan, plan_snapshot, signature_of

__all__ = ["Saver"]

_log = logging.getLogger("ckpt_tasks")


class Saver:
    """Take snapshots and see to it that they are committed.

    `parent` is what the next checkpoint follows: restored from, or committed last; `known_n` the newest ledger entry
    that this process knows to have committed a checkpoint.
    """

    def __init__(self, history: History, config: CheckpointConfig, pruner: Pruner, generations: Generations):
        self.parent: Checkpoint | None = None
        self.last_commit: Checkpoint | None = None
        self.known_n = -1
        self._history = history
        self._config = config
        self._pruner = pruner
        self._generations = generations
        self._plan: SnapshotPlan | None = None
        self._sets: dict[str, ImageSet] = {}
        self._pipeline = Pipeline(self._seal, self._flush, config.flush_timeout_s)
        self._warned_stuck = False

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
        saving: steps.Saving,
        tensors: Mapping[str, torch.Tensor],
        *,
        started_s: float,
        keep: bool,
        step_s: float | None = None,
    ) -> None:
        """Copy the tensors of a state and hand them over; training has waited since `started_s` (perf_counter).

        `keep`: no newer snapshot may take its place. `step_s` goes into the ledger. Raises StoreError where there is no
        memory for it.
        """
        slot = self._pipeline.take_slot()
        images = self._images(slot, tensors)
        self._generations.memory.unseal(slot)
        images.fill(tensors)
        stall_s = time.perf_counter() - started_s
        observed = {"stall_s": round(stall_s, 6)} | ({} if step_s is None else {"step_s": round(step_s, 6)})
        self._pipeline.submit(
            Snapshot(slot=slot, saving=saving, images=images, stall_s=stall_s, keep=keep, observed=observed)
        )
        self._warn_if_stuck(saving.attempt.step)

    def wait(self) -> None:
        """Return when everything is committed; raise what went wrong, and StoreError where it takes too long."""
        done = self._pipeline.wait(self._config.flush_timeout_s)
        failure = self._pipeline.take_failure()
        if failure is not None:
            raise failure
        if not done:
            raise StoreError(
                f"the store has not taken a checkpoint for {self._config.flush_timeout_s:.0f} s",
                hint="Look at the store. What is in the memory directory is restored by the next start on this host.",
            )

    def settle(self) -> None:
        """Wait like `wait`, and leave what went wrong to whoever asks next."""
        self._pipeline.wait(self._config.flush_timeout_s)

    def take_failure(self) -> BaseException | None:
        """Return what went wrong with an earlier snapshot, once; nothing is waited for."""
        return self._pipeline.take_failure()

    def hold(self, slot: str) -> None:
        """Leave a slot for as long as possible: it has what the last process left."""
        self._pipeline.hold(slot)

    def forget_plan(self) -> None:
        """Let the images go: they are taken anew by the next snapshot. Nothing may be on its way."""
        self._pipeline.forget()
        self._plan = None
        self._sets.clear()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _images(self, slot: str, tensors: Mapping[str, torch.Tensor]) -> ImageSet:
        if self._plan is None or self._plan.signature != signature_of(tensors):
            self._pipeline.wait()  # what is on its way still has the old structure
            self.forget_plan()
            self._plan = plan_snapshot(tensors)
            self._generations.make_room(self._plan.size_bytes)
        found = self._sets.get(slot)
        if found is None:
            plan = self._plan
            found = self._sets[slot] = self._generations.take(slot, lambda take: ImageSet(plan, take))
        return found

    def _seal(self, snapshot: Snapshot, before: Snapshot | None) -> None:
        part = steps.digest_images(snapshot.saving.attempt, snapshot.images.images, lambda: snapshot.given_up)
        described = steps.describe(snapshot.saving, [part])
        newest = self.parent.manifest_digest if self.parent else None
        seal = Seal(
            run_key=snapshot.saving.run_key,
            checkpoint=described.checkpoint(parent=newest, n=-1, cost_s=snapshot.stall_s),
            newest=newest,
            in_flight=before.described.digest if before is not None and before.described is not None else None,
        )
        snapshot.described = described
        files = {INDEX_NAME: described.index_bytes, MANIFEST_NAME: described.manifest_bytes}
        try:
            self._generations.memory.seal(snapshot.slot, files, seal.to_bytes())
        except StoreError as error:
            _log.warning("Step %d will not survive this process in memory: %s", snapshot.saving.attempt.step, error)

    def _flush(self, snapshot: Snapshot) -> None:
        store, attempt = self._history.store, snapshot.saving.attempt
        check_owner(self._history.head().state.owner, snapshot.saving.owner)  # who was fenced writes nothing more
        try:
            steps.write_images(store, attempt, snapshot.images.images)
            described = snapshot.description()
            steps.write_description(store, described)
        except CkptError:
            steps.discard(store, attempt)
            raise
        superseded = self._pipeline.take_superseded()
        saved = steps.commit(
            self._history,
            described,
            parent=self.parent.manifest_digest if self.parent else None,
            cost_s=snapshot.stall_s,
            deleted=self._pruner.deleted,
            observed={
                **snapshot.observed,
                "flush_s": round(time.monotonic() - snapshot.taken_s, 6),
                **({"superseded": superseded} if superseded else {}),
            },
        )
        self._pruner.deleted = frozenset()
        self.last_commit = self.parent = saved
        self.known_n = saved.n
        with suppress(StoreError, CommitUncertainError):  # the checkpoint is committed; the next save prunes again
            self._pruner.run(snapshot.saving.owner, saved.manifest_digest)

    def _warn_if_stuck(self, step: int) -> None:
        stuck = self._pipeline.stuck
        if stuck and not self._warned_stuck:
            _log.warning(
                "The store has not taken a checkpoint for %.0f s; step %d and later ones are kept in memory only",
                self._config.flush_timeout_s,
                step,
            )
        self._warned_stuck = stuck
