"""Open a checkpoint: read and verify its manifest and index; verify the bytes that the index names.

Bytes are digested before they are parsed. The index has names, dtypes, shapes and offsets of all tensors. The tree of a
group, which a restore needs, is decoded on demand. This module does not import torch, so that the command line starts
at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.digests import digest_bytes, digest_hex
from ckpt_tasks.format.keys import MANIFEST_NAME, Names, key_of_rank
from ckpt_tasks.format.layout.image import MAX_HEADER_BYTES, REGION_BYTES
from ckpt_tasks.format.layout.index import MAX_INDEX_BYTES, Index, IndexRow, read_index
from ckpt_tasks.format.manifest import MAX_MANIFEST_BYTES, Manifest, ObjectRecord
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.format.saved_kinds import check_group, check_ref
from ckpt_tasks.format.tree import decode, tensor_refs
from ckpt_tasks.gc_pause import gc_paused
from ckpt_tasks.storage.port import ReadableStore
from ckpt_tasks.storage.retrying import read_good

READ_BYTES = REGION_BYTES  # One read covers a large region, or several small ones.


class SavedGroup:
    """One group of a checkpoint: its kind, and its tree, decoded on demand (format/tree.py)."""

    def __init__(self, name: str, manifest: Manifest, index: Index, rank: int = 0):
        self._rank = rank
        self.kind: str = manifest.groups[name]["kind"]
        self.by_rank = "trees" in manifest.groups[name]  # Each rank has its own tree.
        self._name = name
        self._manifest = manifest
        self._index = index

    @cached_property
    def tree(self) -> Any:
        """The decoded tree of the rank that opened the checkpoint.

        Raises IntegrityError if the tree does not fit its kind, or names a tensor that the index lacks.
        """
        return self._decoded(self._encoded[self._rank if len(self._encoded) > 1 else 0])

    @property
    def trees(self) -> list[Any]:
        """The decoded trees: one if all ranks share it, else one for each rank. Raises as `tree` does."""
        return [self._decoded(encoded) for encoded in self._encoded]

    @property
    def _encoded(self) -> Sequence[Any]:
        group = self._manifest.groups[self._name]
        return group["trees"] if "trees" in group else [group["tree"]]

    def _decoded(self, encoded: Any) -> Any:
        with gc_paused():
            own = self._manifest.buffers if self._rank else frozenset()
            tree = decode(_of_rank(encoded, self._rank, own) if own else encoded)
            check_group(self._name, self.kind, tree)
            tensors = self._index.tensors
            for ref in tensor_refs(tree):
                key, array, stride, requires_grad = ref
                if key not in tensors:
                    why = "the state names a tensor that the index lacks"
                    raise IntegrityError(why, key=key, step=self._manifest.step)
                if array or requires_grad or stride is not None:
                    check_ref(ref, *tensors[key])
            return tree


def _of_rank(encoded: Any, rank: int, keys: frozenset[str]) -> Any:
    """Return an encoded tree in which a rank's own tensors replace rank 0's."""
    if isinstance(encoded, list):
        return [_of_rank(item, rank, keys) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    key = encoded.get("~tensor")
    if type(key) is str and key in keys:
        return {"~tensor": key_of_rank(key, rank)}
    if type(key) is list and key[0] in keys:
        return {"~tensor": [key_of_rank(key[0], rank), *key[1:]]}
    return {name: _of_rank(item, rank, keys) for name, item in encoded.items()}


@dataclass(frozen=True)
class Opened:
    """A checkpoint's manifest and index, verified and checked against each other, before any tensor is read."""

    manifest: Manifest
    index: Index = field(repr=False)
    groups: Mapping[str, SavedGroup]

    def check_trees(self) -> None:
        """Decode the trees of all groups; raise IntegrityError if a save cannot have written one of them."""
        for group in self.groups.values():
            _ = group.trees

    @property
    def rows(self) -> tuple[IndexRow, ...]:
        """The rows of the checkpoint's index."""
        return self.index.rows

    @property
    def tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of every tensor, by its full key; the random streams are tensors of the group `rng`."""
        return self.index.tensors


def open_checkpoint(store: ReadableStore, checkpoint: Checkpoint, rank: int = 0, world_size: int = 1) -> Opened:
    """Read manifest and index and check them against each other; raise IntegrityError or StoreError.

    A group that differs between ranks is `rank`'s if `world_size` ranks saved the checkpoint, otherwise rank 0's.
    """
    with gc_paused():
        return _open(store, checkpoint, rank, world_size)


def _open(store: ReadableStore, checkpoint: Checkpoint, rank: int, world_size: int) -> Opened:
    manifest = read_good(store, lambda: read_manifest(store, checkpoint))
    own, reused = checkpoint.manifest.removesuffix(MANIFEST_NAME), Names(checkpoint.reuses)
    for record in manifest.objects:
        if not record.name.startswith(own) and record.name not in reused:
            why = "the manifest names an object of another attempt, and the ledger does not say that it is reused"
            raise IntegrityError(f"{why}: {record.name}", key=checkpoint.manifest, step=checkpoint.step)
    index = read_good(store, lambda: read_index_of(store, manifest))
    objects = {record.name: (record.digested_bytes, record.size_bytes) for record in manifest.objects}
    rank = rank if world_size == manifest.world_size else 0
    faults = index.coverage_faults(whole=manifest.world_size == 1) or index.object_faults(objects)
    if faults:
        raise IntegrityError(
            f"the index has holes: {'; '.join(faults[:5])}", key=manifest.index.name, step=checkpoint.step
        )
    return Opened(manifest, index, {name: SavedGroup(name, manifest, index, rank) for name in manifest.groups})


def ranks_of(store: ReadableStore, checkpoint: Checkpoint) -> int:
    """Return the number of ranks that saved a checkpoint; raise IntegrityError or ObjectNotFoundError."""
    return read_manifest(store, checkpoint).world_size


def read_manifest(store: ReadableStore, checkpoint: Checkpoint) -> Manifest:
    """Read a checkpoint's manifest; raise IntegrityError or ObjectNotFoundError."""
    data = store.get(checkpoint.manifest, MAX_MANIFEST_BYTES)
    manifest = Manifest.from_bytes(data, digest=checkpoint.manifest_digest, name=checkpoint.manifest)
    if (manifest.step, manifest.attempt) != (checkpoint.step, checkpoint.attempt):
        what_it_says = f"step {manifest.step}, attempt {manifest.attempt}"
        raise IntegrityError(f"the manifest says {what_it_says}", key=checkpoint.manifest, step=checkpoint.step)
    return manifest


def read_index_of(store: ReadableStore, manifest: Manifest) -> Index:
    """Read the index that a manifest names; raise IntegrityError or ObjectNotFoundError."""
    of = manifest.index
    return read_index(store.get(of.name, MAX_INDEX_BYTES), digest=of.digest, name=of.name)


def check_header(store: ReadableStore, record: ObjectRecord) -> bytes:
    """Return an object's header; raise IntegrityError if its digest or the object's size is wrong."""
    _check_size(record, store.size(record.name))

    if not record.digested_bytes:  # It is a group's own file: its regions cover all of its bytes.
        return _good_header(record, b"")

    def header() -> bytes:
        data = bytearray(record.digested_bytes)
        store.read(record.name, 0, memoryview(data))
        return _good_header(record, bytes(data))

    return read_good(store, header)


def read_whole(store: ReadableStore, record: ObjectRecord) -> bytes:
    """Return all bytes of a small object, read with one request; raise IntegrityError if size or header are wrong."""

    def whole() -> bytes:
        data = store.get(record.name, record.size_bytes)
        _check_size(record, len(data))
        _good_header(record, data)
        return data

    return read_good(store, whole)


def _check_size(record: ObjectRecord, size_bytes: int) -> None:
    if size_bytes != record.size_bytes:
        raise IntegrityError(f"the object has {size_bytes} bytes of {record.size_bytes}", key=record.name)
    if record.digested_bytes > min(size_bytes, MAX_HEADER_BYTES + 8):
        raise IntegrityError("the header is larger than any that is written", key=record.name)


def _good_header(record: ObjectRecord, data: bytes) -> bytes:
    if digest_hex(data[: record.digested_bytes]) != record.digest:
        raise IntegrityError("the header's bytes have changed", key=record.name)
    return data


def by_object(rows: Iterable[IndexRow]) -> dict[str, list[IndexRow]]:
    """Return the rows of every object, by object name."""
    rows_of: dict[str, list[IndexRow]] = {}
    for row in rows:
        rows_of.setdefault(row.object, []).append(row)
    return rows_of


@gc_paused()
def merge_runs(rows: Iterable[IndexRow], max_bytes: int = READ_BYTES) -> list[list[IndexRow]]:
    """Group contiguous regions of an object into reads of at most `max_bytes`; a larger region is read alone."""
    runs: list[list[IndexRow]] = []
    for row in sorted(rows, key=lambda row: (row.object, row.begin, row.end)):
        run = runs[-1] if runs else None
        follows = run and (run[-1].object, run[-1].end) == (row.object, row.begin)
        if run and follows and row.end - run[0].begin <= max_bytes:
            run.append(row)
        else:
            runs.append([row])
    return runs


def changes_in(run: Sequence[IndexRow], data: memoryview) -> list[str]:
    """Return a text for each region of a read that has changed; `data` holds the bytes of the read."""
    start = run[0].begin
    return [change(row) for row in run if digest_bytes(data[row.begin - start : row.end - start]) != row.digest]


def change(row: IndexRow) -> str:
    """Return the text that says that a region's bytes have changed."""
    return f"{row.full_key}: bytes {row.begin}–{row.end} of {row.object} have changed"
