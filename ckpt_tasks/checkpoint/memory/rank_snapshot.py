"""A snapshot of many ranks: its parts on this host.

Each rank seals its own part: its images, an index and a manifest of these alone, and its own trees. Parts with the same
attempt name belong together. A rank restores from its own trees and from all regions on this host. If these do not
cover what the rank needs (ranks on other hosts wrote some replicas), the snapshot cannot be used on this host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt_tasks.checkpoint.restore.download import DownloadedTensors, Laid, Read
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.layout.index import Index, IndexRow
from ckpt_tasks.format.layout.regions import Box, intersection
from ckpt_tasks.format.layout.tiling import untiled
from ckpt_tasks.format.manifest import Manifest
from ckpt_tasks.format.records import Checkpoint, Seal
from ckpt_tasks.gc_pause import gc_paused
from ckpt_tasks.run.opening import Opened, SavedGroup, changes_in, read_index_of, read_manifest
from ckpt_tasks.state.tensors.placements import ALONE, place_of
from ckpt_tasks.state.tensors.tensor_sources import TensorSource
from ckpt_tasks.storage.port import ReadableStore


class Part(NamedTuple):
    """One rank's seal, the store with its objects, and where they are, in words for the log."""

    seal: Seal
    store: ReadableStore
    place: str = "in memory"


@dataclass(frozen=True, eq=False)
class RankSnapshot:
    """The parts of one attempt on this host, by rank; this rank's part is among them.

    `slot` is this rank's slot in the memory directory; None if a feature keeps it. `checkpoint` is the
    attempt's checkpoint in the ledger, or the one that the commit would create (`n` is -1).
    """

    rank: int
    parts: Mapping[int, Part]
    slot: str | None
    checkpoint: Checkpoint

    @property
    def seal(self) -> Seal:
        """The seal of this rank's part."""
        return self.parts[self.rank].seal

    @property
    def place(self) -> str:
        """Where the snapshot is, in words for the log."""
        return self.parts[self.rank].place

    @property
    def store(self) -> ReadableStore:
        """The objects of all parts as one store."""
        return _PartsStore(self.rank, self.parts)

    def open(self) -> Opened:
        """Read all parts, and this rank's trees; raise IntegrityError or ObjectNotFoundError."""
        with gc_paused():
            manifests = {rank: manifest_of(part) for rank, part in self.parts.items()}
            own = manifests[self.rank]
            index = Index.joined(read_index_of(part.store, manifests[rank]) for rank, part in self.parts.items())
            objects = tuple(record for manifest in manifests.values() for record in manifest.objects)
            faults = index.object_faults(
                {record.name: (record.digested_bytes, record.size_bytes) for record in objects}
            )
            if len(self.parts) == own.world_size:
                faults = faults or index.coverage_faults(whole=False)
            if faults:
                raise IntegrityError(f"the index has holes: {'; '.join(faults[:5])}", key=own.index.name, step=own.step)
            opened = replace(own, objects=objects)
            return Opened(opened, index, {name: SavedGroup(name, opened, index, self.rank) for name in own.groups})

    def tensors(self, store: Any, rows: Sequence[IndexRow]) -> TensorSource:
        """Return the tensors of those `rows` that are on this host."""
        return _CoveredTensors(store, rows)


class _PartsStore:
    """The objects of all parts on this host as one store."""

    near = True
    gap_bytes = 0

    def __init__(self, rank: int, parts: Mapping[int, Part]):
        self.url = parts[rank].store.url
        self._own = parts[rank].store
        self._parts = parts
        self._rank = rank
        self._of: dict[str, ReadableStore] = {}

    @property
    def ranks(self) -> int:
        """The number of ranks whose parts this host has."""
        return len(self._parts)

    @property
    def is_complete(self) -> bool:
        """Whether this host has the parts of all ranks."""
        return len(self._parts) == manifest_of(self._parts[self._rank]).world_size

    def get(self, name: str, max_bytes: int) -> bytes:
        return self._store(name).get(name, max_bytes)

    def read(self, name: str, begin: int, into: memoryview) -> None:
        self._store(name).read(name, begin, into)

    def size(self, name: str) -> int:
        return self._store(name).size(name)

    def map(self, name: str) -> memoryview | None:
        """Map an object in memory; return None for one in a local directory."""
        store = self._store(name)
        mapped: memoryview | None = store.map(name) if hasattr(store, "map") else None
        return mapped

    def _store(self, name: str) -> ReadableStore:
        if not self._of:
            for part in self._parts.values():
                self._of |= dict.fromkeys((record.name for record in manifest_of(part).objects), part.store)
        return self._of.get(name, self._own)  # If no part has the object, this rank's own part raises the error.


class _CoveredTensors(DownloadedTensors):
    """The tensors of `rows`, which may be only a part of a checkpoint; they must cover every tensor that is read.

    Objects in memory are verified and copied in place: no rank may refill its slot before all ranks have copied.
    """

    def __init__(self, store: _PartsStore, rows: Sequence[IndexRow]):
        super().__init__(store, rows)
        maps = {name: store.map(name) for name in self._memory}
        self._mapped = {name: memory for name, memory in maps.items() if memory is not None}
        self._memory |= {name: Laid(0, memory) for name, memory in self._mapped.items()}
        self._regions: dict[str, list[IndexRow]] = {}
        for row in rows:
            self._regions.setdefault(row.full_key, []).append(row)
        self._asked: list[tuple[torch.Tensor, str]] = []
        # Digests in memory are work for the cores, which the ranks of this host share.
        if self._mapped:
            self._threads = max(1, min(self._threads, (os.cpu_count() or 1) // store.ranks))
        self._is_complete = store.is_complete  # If it is complete, `open` has checked that no tensor has a hole.

    def read(self, key: str) -> torch.Tensor:
        shape = self.like(key).shape
        if not self._is_complete:
            self._check(key, Box((0,) * len(shape), tuple(shape)))
        return super().read(key).clone()  # The slot may be refilled while the program still holds the value.

    def fill(self, into: torch.Tensor, key: str) -> None:
        self._asked.append((into, key))
        super().fill(into, key)

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, str]] = (), *, verify: bool = True) -> None:
        asked, self._asked = self._asked, []
        for into, key in () if self._is_complete else (*asked, *pairs):
            self._check(key, place_of(into, key, ALONE).box)
        super().fetch(pairs)

    def read_span(self, read: Read) -> None:
        name, _, rows = read
        if name not in self._mapped:
            super().read_span(read)
        elif faults := [fault for row in rows for fault in changes_in([row], self._mapped[name][row.begin :])]:
            raise IntegrityError(faults[0])

    def _check(self, key: str, box: Box) -> None:
        rows = self._regions[key]
        common = [*_within(rows, box)]
        if 0 in box.shape or (len(common) == 1 and common[0] == box):
            return
        offset, shape = (np.array([getattr(one, name) for one in common], np.int64) for name in ("offset", "shape"))
        full = np.broadcast_to(np.array(box.shape, np.int64), shape.shape)
        if not common or len(untiled(np.zeros(len(common), np.int64), full, offset - np.array(box.offset), shape)):
            raise IntegrityError("the ranks of this host have not all of it", key=key)


def _within(rows: Iterable[IndexRow], box: Box) -> Iterator[Box]:
    for row in rows:
        common = intersection(row.box, box)
        if common is not None:
            yield common


def manifest_of(part: Part) -> Manifest:
    """Read a part's manifest; raise IntegrityError or ObjectNotFoundError."""
    return read_manifest(part.store, part.seal.checkpoint)
