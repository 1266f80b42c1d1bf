"""A rank's half of a save: live tensors → images in memory → digests → objects in the store.

This module does not read or write the ledger. The committer gets a RankPart from each rank.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial

from ckpt_tasks.checkpoint.memory.cache import SnapshotCache
from ckpt_tasks.checkpoint.memory.first import FirstCopy
from ckpt_tasks.checkpoint.memory.memory import Fill
from ckpt_tasks.checkpoint.memory.pages import GaveWay, allocate_pages, touch
from ckpt_tasks.checkpoint.memory.samples import sample_values, take_samples
from ckpt_tasks.checkpoint.memory.snapshot import Image, ImageSet, LateCopy, SnapshotPlan, plan_snapshot
from ckpt_tasks.checkpoint.save.parts import (
    Digested,
    RankPart,
    Saving,
    Stored,
    SupersededError,
    digest_file,
    digest_image,
    joined,
    reuse,
)
from ckpt_tasks.checkpoint.save.pipeline import Snapshot
from ckpt_tasks.checkpoint.save.prepared import compared_values, prepare_part
from ckpt_tasks.errors import CkptError, StoreError
from ckpt_tasks.format.keys import INDEX_NAME, MANIFEST_NAME, attempt_prefix
from ckpt_tasks.format.policy.space import CheckpointSize
from ckpt_tasks.format.records import Compared
from ckpt_tasks.state.kinds.group_parts import Captured
from ckpt_tasks.state.tensors.device import DeviceCopy, Devices
from ckpt_tasks.storage.port import Store, moved
from ckpt_tasks.system import system

_log = logging.getLogger("ckpt_tasks")


class RankSaver:
    """Fills the slots of a process's memory with images of its state, digests them, and puts them into the store.

    The plan and the memory of the images are kept while names, dtypes and shapes stay the same.
    """

    def __init__(
        self,
        cache: SnapshotCache,
        rank: int = 0,
        world_size: int = 1,
        copies: Sequence[Callable[[Snapshot, Sequence[tuple[RankPart, memoryview | None]]], None]] = (),
    ):
        self._copies = copies
        self._cache = cache
        self._rank = rank
        self._world_size = world_size
        self._devices = Devices()
        self._plan: SnapshotPlan | None = None
        self._sets: dict[str, ImageSet] = {}  # The key is the slot.
        self._taking = system().lock()
        self._hurries = False  # True while training waits for the lock, so that an allocating thread releases the lock.

    # ── while training waits ─────────────────────────────────────────────────────────────────────────────────

    @property
    def size(self) -> CheckpointSize:
        """The size of this rank's part of a checkpoint in storage; zero before a plan is made."""
        plan = self._plan
        return CheckpointSize(0) if plan is None else plan.size

    @property
    def is_planned(self) -> bool:
        """Whether a plan of the images exists."""
        return self._plan is not None

    @property
    def images(self) -> dict[str, tuple[Image, ...]]:
        """The images of each slot that has memory."""
        return {slot: made.images for slot, made in [*self._sets.items()]}

    def fits(self, captured: Captured) -> bool:
        """Return True if the plan fits a state of this structure."""
        return self._plan is not None and self._plan.fits(captured.tensors, captured.frozen, captured.places)

    def plan(self, captured: Captured) -> None:
        """Plan images for a state of this structure."""
        self._plan = plan_snapshot(
            captured.tensors,
            captured.frozen,
            rank=self._rank,
            world_size=self._world_size,
            places=captured.places,
        )
        self._cache.make_room(sum(self._plan.sizes.values()))

    def forget(self) -> None:
        """Drop the plan and the images; no snapshot may be under way."""
        with self._taking:
            self._plan = None
            self._sets.clear()

    def fill(self, slot: str, captured: Captured) -> tuple[ImageSet, DeviceCopy | LateCopy | None]:
        """Copy a state into the images of a slot; the plan must fit it.

        Host tensors are copied on return, except constant ones. Device tensors are copied before any device work that
        training queues later: call wait() of the result before you read the images. Raises StoreError if there is no
        memory.
        """
        assert self._plan is not None
        first = FirstCopy(self._plan, captured.tensors)
        self._hurries = True
        with self._taking:
            self._hurries = False
            images = self._take(slot, self._plan, None if captured.constant else first.write)
            self._cache.unseal(slot)
        return images, None if first.done else images.fill(captured.tensors, self._devices, captured.constant)

    def sample(self, captured: Captured, saving: Saving) -> Callable[[], Compared]:
        """Sample values that several ranks hold; return a function that computes their digests in the background."""
        if self._world_size == 1:
            return dict
        held = take_samples(captured.replicated, saving.turn, self._devices)
        values = sample_values(captured.one_for_all, saving.turn, self._devices)
        return cache(partial(compared_values, saving.groups, values, held))

    # ── in the background of training ────────────────────────────────────────────────────────────────────────

    def take_ahead(self, *slots: str) -> None:
        """Allocate the memory of slots in advance: a first write to memory takes several times as long as a copy."""
        system().lower_priority()
        for slot in slots:
            self._touch(slot)

    def _touch(self, slot: str) -> None:
        images: tuple[Image, ...] = ()
        with suppress(CkptError, GaveWay), self._taking:  # The snapshot that needs the memory raises the error.
            if (plan := self._plan) is not None:  # The plan may have been dropped or replaced meanwhile.
                images = self._take(slot, plan, partial(self._allocate, plan)).images
        for image in images:
            touch(image.buffer, lambda: self._wants(plan))

    def _allocate(self, plan: SnapshotPlan, files: Mapping[str, int]) -> bool:
        allocate_pages(files, plan.sizes, lambda: self._wants(plan) and not self._hurries)
        return True

    def _wants(self, plan: SnapshotPlan | None) -> bool:
        """Return True if a save may still need this plan's memory; False when the interpreter exits, to end early."""
        return self._plan is plan and threading.main_thread().is_alive()

    def seal(self, snapshot: Snapshot, before: Snapshot | None) -> None:
        """Digest this rank's part of a snapshot, and seal it in memory; does not wait for other ranks or the store.

        `before` is the older snapshot that storage may lack. Logs a warning if the seal cannot be written.
        """
        saving, digested = snapshot.saving, list[Digested]()
        for image in snapshot.images.images:
            part = digest_image(saving.attempt, image, lambda: snapshot.given_up, self._rank)
            digested.append(Digested(part, image.bytes))
            snapshot.digested.put(digested[-1])
        stored = (
            snapshot.tenure.line.reusable(self._cache.store)
            if any(file.contents is None for file in snapshot.files)
            else None
        )
        for file in snapshot.files:
            digested.append(digest_file(saving.attempt, file, lambda: snapshot.given_up, stored, self._rank))
            snapshot.digested.put(digested[-1])
        if not self._cache.outlives and self._world_size > 1:
            snapshot.unsealed = self._cache.left is not None
            return
        prepared = snapshot.sealed = prepare_part(saving, joined([one.part for one in digested], self._rank))
        in_flight = attempt_prefix(before.saving.attempt) + MANIFEST_NAME if before is not None else None
        files: dict[str, bytes | memoryview] = {
            file.name: file.contents.bytes for file in snapshot.files if file.contents is not None
        }
        files |= {INDEX_NAME: prepared.index_bytes, MANIFEST_NAME: prepared.manifest_bytes}
        for attached in saving.attached:
            files |= attached.files()
        try:
            self._cache.memory.seal(snapshot.slot, files, snapshot.seal_of(prepared, in_flight).to_bytes())
            snapshot.unsealed = self._cache.left is not None
        except StoreError as error:
            _log.warning("Step %d will not survive this process in memory: %s", saving.attempt.step, error)
            snapshot.unsealed = True

    def refuse(self, slot: str) -> None:
        """Mark a snapshot in a slot as not restorable, because its save was refused."""
        # If unsealing fails, a restart still compares the snapshots of all ranks before a restore.
        with suppress(CkptError):
            self._cache.memory.unseal(slot)

    def write(self, store: Store, snapshot: Snapshot, stored: Stored | None) -> RankPart | None:
        """Put every image as soon as it is digested, except images already `stored`; return this rank's part.

        Returns None if a newer snapshot has replaced this one. Features that copy the files do so before.
        """
        attempt = snapshot.saving.attempt
        digested: Iterable[Digested] = iter(snapshot.digested.get, None)
        try:
            if self._copies:
                digested = [*digested]
                snapshot.wait_digested()
                files = [(reuse(one, stored), one.bytes) for one in digested]
                for copy in self._copies:
                    copy(snapshot, files)
            parts = []
            for one in digested:
                moved()
                part = reuse(one, stored)
                if part is one.part and one.bytes is not None:
                    store.put(part.objects[0].name, [one.bytes])
                parts.append(part)
            snapshot.wait_digested()
        except SupersededError:
            return None
        return joined(parts, self._rank).with_groups(attempt.step, snapshot.saving.groups, snapshot.compared())

    def _take(self, slot: str, plan: SnapshotPlan, fill: Fill | None = None) -> ImageSet:
        """Return a slot's images, and make them at the first use; the caller holds `_taking`."""
        images = self._sets.get(slot)
        if images is None:
            images = self._sets[slot] = ImageSet(plan, self._cache.take(slot, plan.sizes, fill))
            for image in images.images:
                if image.name in plan.devices:
                    self._devices.pin(image.buffer, image, plan.devices[image.name])
        return images
