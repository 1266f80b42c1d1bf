"""Snapshots that outlive their process: where they are, which of them may be restored, and how to read them.

A snapshot in the memory directory has the form of a checkpoint: images, index and manifest, every byte under a digest.
A committed snapshot may be restored. An uncommitted one may be restored if no other checkpoint was committed after it
was taken, except by the save under way at that time. With many ranks each rank has its part in its own memory;
`rank_snapshot.py` reads them.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tasks.checkpoint.extension import Extension, Extensions
from ckpt_tasks.checkpoint.memory.memory import (
    SLOTS,
    Fill,
    MemoryDirectory,
    PrivateMemory,
    SlotFiles,
    SnapshotMemory,
    private_root,
    sweep,
)
from ckpt_tasks.checkpoint.memory.memory_room import default_directory
from ckpt_tasks.checkpoint.memory.rank_snapshot import Part, RankSnapshot
from ckpt_tasks.checkpoint.memory.slot import SlotStore
from ckpt_tasks.checkpoint.restore.fetch import StoredTensors
from ckpt_tasks.errors import CkptError, ConfigError, StoreError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import FORMAT_NAME
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.format.ledger import lineage
from ckpt_tasks.format.records import Checkpoint, Seal
from ckpt_tasks.run.opening import Opened, open_checkpoint
from ckpt_tasks.state.tensors.placements import ALONE, World
from ckpt_tasks.state.tensors.tensor_sources import TensorSource
from ckpt_tasks.storage.port import ReadableStore, Store

_log = logging.getLogger("ckpt_tasks")


@dataclass(frozen=True)
class CachedSnapshot:
    """A complete snapshot on this host: its bytes, and its checkpoint, committed or not.

    `slot` is its slot in the memory directory; None if a feature keeps it. `checkpoint` is the snapshot's checkpoint in
    the ledger, or the one that the commit would create (`n` is -1). `place`: where it is, in words for the log.
    """

    seal: Seal
    store: ReadableStore
    slot: str | None
    checkpoint: Checkpoint
    place: str

    def open(self) -> Opened:
        """Open the snapshot by its own manifest; the committed manifest may name objects of older checkpoints."""
        return open_checkpoint(self.store, self.seal.checkpoint)

    def tensors(self, store: Any, rows: Sequence[IndexRow]) -> TensorSource:
        """Return the tensors of these `rows` from the snapshot."""
        return StoredTensors(store, rows)


class SnapshotCache:
    """The snapshots of one run in this host's memory, taken by this process or by the previous one.

    In a `world` of many ranks the memory is this rank's own; it also reads sealed snapshots of other ranks on the host.
    """

    def __init__(
        self,
        store: Store,
        memory_dir: str | os.PathLike[str] | None,
        extensions: Extensions | None = None,
        world: World = ALONE,
    ):
        self.memory: SnapshotMemory = PrivateMemory()
        self._extensions = extensions or Extensions()
        self.store = store
        self._memory_dir = memory_dir
        self._world = world
        self._root = Path()
        self._run = ""
        self._run_key = ""
        self.left: MemoryDirectory | None = None  # No longer in use, but a restart may need its snapshots.
        self._said = False  # True once the warning "snapshots end with this process" was logged.

    def reached(self, begin: int) -> int | None:
        """Return the last step after `begin` that earlier processes have completed; None if this host does not know."""
        memory = self.left or self.memory
        return memory.reached(begin) if isinstance(memory, MemoryDirectory) else None

    def note_again(self, begin: int, reached: int) -> None:
        """Note for the next process of this host that the steps between are repeated, until a commit."""
        if isinstance(self.memory, MemoryDirectory):
            self.memory.note_again(begin, reached)

    def note_step(self, step: int) -> None:
        """Note the last completed step for the next process of this host."""
        if isinstance(self.memory, MemoryDirectory):
            self.memory.note_step(step)

    def check(self) -> None:
        """Raise ConfigError if other users can access our directory in the configured memory directory."""
        if self._memory_dir not in (None, "auto"):
            private_root(Path(self._memory_dir))

    def was_used(self) -> bool:
        """Return True if an earlier process of this host has taken a run at this URL: its store has answered then."""
        if self._extensions.tell(Extension.has_answered):
            return True
        urls: set[str] = set()

        def note(name: str, url: str) -> bool:
            urls.add(url)
            return False  # Remove nothing.

        if (directory := self._directory(0)) is not None:
            with suppress(ConfigError):
                sweep(private_root(directory), note, left_s=0)
        return self.store.url in urls

    @property
    def outlives(self) -> bool:
        """Whether a sealed snapshot in memory outlives this process."""
        return isinstance(self.memory, MemoryDirectory)

    def open(self, run_key: str) -> None:
        """Take the run's memory directory; if that is impossible, use private memory and log a warning."""
        self._run_key = run_key
        if self._extensions.at(Extension.opened):
            self._extensions.tell(Extension.opened, self.store.get(FORMAT_NAME, 1 << 20))
        directory = self._directory(0)
        if directory is None or isinstance(self.memory, MemoryDirectory) or self.left is not None:
            return
        self._run = _name_of(self.store.url, self.store.get(FORMAT_NAME, 1 << 20))
        try:
            self._root = private_root(directory)
            self.memory = MemoryDirectory(self._root, self._name(self._world.rank), self.store.url)
            sweep(self._root, is_gone)
        except (StoreError, ConfigError) as error:
            if self._memory_dir != "auto":
                raise
            self._do_without(str(error))

    def restorable(self, live: Iterable[Checkpoint]) -> Sequence[CachedSnapshot | RankSnapshot]:
        """List the snapshots of this host that may be restored, given the live checkpoints.

        Snapshots in memory come first, then those that a feature keeps; each kind newest first.
        """
        live = tuple(live)
        snapshots = self._in_memory(live)
        kept = [part for part in self._kept(self._world.rank) if self._belongs(part.seal, live)]
        return [*snapshots, *(self._snapshot(None, part, self._kept, live) for part in kept)]

    def _belongs(self, seal: Seal, live: tuple[Checkpoint, ...]) -> bool:
        return seal.run_key == self._run_key and usable(seal, live)

    def _in_memory(self, live: tuple[Checkpoint, ...]) -> list[CachedSnapshot | RankSnapshot]:
        memory = self.left or self.memory
        if not isinstance(memory, MemoryDirectory):
            return []
        sealed = [(slot, part) for slot, part in _sealed(memory, self.store) if self._belongs(part.seal, live)]
        # If storage lacks two snapshots, the newer one was taken while the older one was still being written.
        taken_before = {part.seal.in_flight for _, part in sealed}
        sealed.sort(key=lambda pair: not taken_before.isdisjoint(_identities(pair[1].seal.checkpoint)))
        return [self._snapshot(slot, part, self._remembered, live) for slot, part in sealed]

    def _snapshot(
        self, slot: str | None, own: Part, of_rank: Callable[[int], Iterable[Part]], live: tuple[Checkpoint, ...]
    ) -> CachedSnapshot | RankSnapshot:
        """Return the snapshot that has this rank's part; `of_rank` returns the parts of another rank on this host."""
        checkpoint = next((one for one in live if one.manifest == own.seal.checkpoint.manifest), own.seal.checkpoint)
        if self._world.size == 1:
            return CachedSnapshot(own.seal, own.store, slot, checkpoint, own.place)
        parts = {self._world.rank: own}
        for rank in {*range(self._world.size)} - {self._world.rank}:
            same = [part for part in of_rank(rank) if part.seal.checkpoint.manifest == checkpoint.manifest]
            parts |= {rank: same[0]} if same else {}
        return RankSnapshot(self._world.rank, parts, slot, checkpoint)

    def _remembered(self, rank: int) -> Iterator[Part]:
        memory = SlotFiles(self._root / self._name(rank))
        if memory.path.is_dir():
            yield from (part for _, part in _sealed(memory, self.store))

    def _kept(self, rank: int) -> Iterable[Part]:
        return self._extensions.tell(Extension.snapshots, rank) or ()

    def clean(self, live: Iterable[Checkpoint]) -> int:
        """Empty the slots and return the bytes freed; keep them (0) if one has a snapshot that storage lacks."""
        live = list(live)
        known = {checkpoint.manifest_digest for checkpoint in live}
        uncommitted = any(snapshot.checkpoint.manifest_digest not in known for snapshot in self._in_memory(tuple(live)))
        if not isinstance(self.memory, MemoryDirectory) or uncommitted:
            return 0
        before_bytes = self.memory.held_bytes()
        for slot in SLOTS:
            self.memory.clear(slot)
        return before_bytes - self.memory.held_bytes()

    def make_room(self, size_bytes: int) -> None:
        """Check that shared memory has room for two snapshots of this size; if not, use private memory.

        Removes snapshots that another number of ranks left: nothing can restore them any more.
        """
        if isinstance(self.memory, MemoryDirectory):
            sweep(self._root, self._is_of_others, left_s=0)
        if self._memory_dir != "auto":
            return
        if isinstance(self.memory, MemoryDirectory):
            # The other ranks of this host need as much, and some of it is allocated already.
            memories = [SlotFiles(path) for path in map(self._root.joinpath, map(self._name, range(self._world.size)))]
            here = [memory for memory in memories if memory.path.is_dir()]
            held_bytes = sum(memory.held_bytes() for memory in here)
            if default_directory(size_bytes * len(here) - held_bytes // len(SLOTS)) is None:
                self._do_without(f"{size_bytes * len(SLOTS)} bytes have no room in shared memory")
        elif not self._said:
            self._do_without("there is no shared memory, or it has no room")

    def take(self, slot: str, sizes: Mapping[str, int], fill: Fill | None = None) -> dict[str, memoryview]:
        """Return a slot's memory as SnapshotMemory.take() does; private memory if the memory directory has no room."""
        try:
            return self.memory.take(slot, sizes, fill)
        except StoreError as error:
            if isinstance(self.memory, PrivateMemory):
                raise
            self._do_without(str(error))
        return self.take(slot, sizes, fill)

    def unseal(self, slot: str) -> None:
        """Mark a slot as incomplete, because its images will change; raise StoreError if that fails."""
        if isinstance(self.memory, MemoryDirectory) and not self.memory.is_there:
            self._do_without(f"somebody has removed the memory directory {self.memory.path}")
        self.memory.unseal(slot)
        if self.left is not None:
            self.left.clear(slot)

    def forget_left(self, *, keep: bool = False) -> None:
        """Release the memory directory that this process no longer uses; its snapshots are removed unless `keep`."""
        left, self.left = self.left, None
        if left is not None:
            left.close(keep=keep)

    def close(self, *, keep: bool) -> None:
        """Release the memory; `keep` sealed snapshots for the next process."""
        memory, self.memory = self.memory, PrivateMemory()
        memory.close(keep=keep)
        self.forget_left(keep=keep)

    def _name(self, rank: int) -> str:
        """Return the name of the memory of a rank of this run."""
        return self._run if self._world.size == 1 else f"{self._run}-{rank:05d}-of-{self._world.size:05d}"

    def _is_of_others(self, name: str, url: str) -> bool:
        run, _, of = name.partition("-")
        return run == self._run and of.partition("-of-")[2] != self._name(0).partition("-of-")[2]

    def _directory(self, size_bytes: int) -> Path | None:
        if self._memory_dir == "auto":
            return default_directory(size_bytes)
        return None if self._memory_dir is None else Path(self._memory_dir).absolute()

    def _do_without(self, why: str) -> None:
        kept = self._extensions.tell(Extension.keeps_in)
        place = f"{kept} or storage" if kept else "storage"
        _log.warning(
            "Snapshots are kept in this process's own memory: after a crash, training resumes from %s (%s)", place, why
        )
        self._said = True
        memory, self.memory = self.memory, PrivateMemory()
        if isinstance(memory, MemoryDirectory) and any(map(memory.sealed, SLOTS)):
            self.left = memory
        else:
            memory.close(keep=False)


def usable(seal: Seal, live: tuple[Checkpoint, ...]) -> bool:
    """Return True if a snapshot may be restored: it is committed, or follows the newest committed checkpoint."""
    if any(checkpoint.manifest == seal.checkpoint.manifest for checkpoint in live):
        return True
    if not live:
        return seal.newest is None
    newest = lineage(live)[0]
    return newest.manifest_digest == seal.newest or seal.in_flight in _identities(newest)


def _identities(checkpoint: Checkpoint) -> frozenset[str]:
    """Return a checkpoint's manifest digest, and the name of its manifest, which many ranks know earlier."""
    return frozenset((checkpoint.manifest_digest, checkpoint.manifest))


def _sealed(memory: SlotFiles, storage: ReadableStore) -> Iterator[tuple[str, Part]]:
    """Yield the complete slots with their parts."""
    for slot in SLOTS:
        data = memory.sealed(slot)
        if data is None:
            continue
        try:
            yield slot, Part(Seal.from_bytes(data), SlotStore(memory, slot, storage))
        except CkptError as error:
            _log.warning("A snapshot in memory is not used: %s", error)


def snapshots_left(directory: Path) -> dict[str, tuple[int, bool]]:
    """Return the snapshots that no process of this host holds: run directory → (size in bytes, whether it is gone).

    Only a local disk tells that a run is gone.
    """
    root, gone = directory / f"ckpt-tasks-{os.getuid()}", set[str]()

    def note(name: str, url: str) -> bool:
        gone.update([url] if is_gone(name, url) else [])
        return True

    sizes = Counter[str]()
    for url, size_bytes in sweep(root, note, left_s=0, dry_run=True) if root.is_dir() else ():
        sizes[url] += size_bytes  # Each rank has its own.
    return {url: (size_bytes, url in gone) for url, size_bytes in sorted(sizes.items()) if size_bytes}


def free_snapshots(directory: Path) -> None:
    """Remove the snapshots of runs that are gone."""
    sweep(private_root(directory), is_gone, left_s=0)


def _name_of(url: str, format_json: bytes) -> str:
    """Return the name of a run's memory: a hash of URL and format.json, since another run may replace it at its URL."""
    return digest_hex(os.fsencode(url) + b"\0" + format_json)


def is_gone(name: str, url: str) -> bool:
    """Return True if a local disk no longer has the run whose memory has this `name`."""
    try:
        return os.path.isabs(url) and _name_of(url, Path(url, FORMAT_NAME).read_bytes()) != name.partition("-")[0]
    except (FileNotFoundError, NotADirectoryError):
        return True
