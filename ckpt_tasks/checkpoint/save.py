"""Save: plan → snapshot → flush → index and manifest → commit.

Invariants (MUST: breaking one loses data)

1. Every object is durable before the manifest is written, and the manifest before the ledger entry is put.
2. The entry is put only when every expected rank handed in its part, the regions of every tensor tile its box exactly,
   and every object has its expected size.
3. Every object's name holds the attempt's own nonce: no save ever writes into another one's objects.
4. Any failure of any writer is raised, and then nothing is committed.
"""

from __future__ import annotations

import platform
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch

from ckpt_tasks.checkpoint.history import History, now_iso
from ckpt_tasks.errors import CkptError, IntegrityError, StateError, StoreError, UnsupportedStateError
from ckpt_tasks.format.digests import digest_bytes, digest_hex
from ckpt_tasks.format.image import Slot
from ckpt_tasks.format.index import MAX_INDEX_BYTES, IndexRow, coverage_faults, write_index
from ckpt_tasks.format.keys import INDEX_NAME, MANIFEST_NAME, Attempt, attempt_prefix
from ckpt_tasks.format.ledger import Checkpoint, Owner, State
from ckpt_tasks.format.manifest import MAX_MANIFEST_BYTES, Manifest, ObjectRecord
from ckpt_tasks.format.tree import encode
from ckpt_tasks.state.capture import Captured
from ckpt_tasks.state.snapshot import Image, SnapshotPlan
from ckpt_tasks.storage.port import Store

__all__ = ["Part", "Saving", "Sealed", "commit", "discard", "encode_groups", "flush", "new_attempt", "seal"]

_WRITERS = 2


@dataclass(frozen=True)
class Part:
    """What one rank wrote of one attempt: its index rows and its objects."""

    rank: int
    rows: tuple[IndexRow, ...]
    objects: tuple[ObjectRecord, ...]


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Everything about one save that is known before it: what is saved, as what, by whom, after what."""

    attempt: Attempt
    run_key: str
    owner: Owner
    parent: str | None
    groups: Mapping[str, Mapping[str, object]]
    metrics: Mapping[str, float]
    epochs: int | None = None
    world_size: int = 1


@dataclass(frozen=True)
class Sealed:
    """A checkpoint of which only the ledger entry is missing: its manifest, with the digest and size of its bytes."""

    manifest: Manifest
    digest: str
    size_bytes: int


def new_attempt(step: int, owner: Owner) -> Attempt:
    """Name a new try to save a step."""
    return Attempt(step, owner.epoch, secrets.token_hex(8))


def encode_groups(captured: Captured) -> dict[str, dict[str, object]]:
    """Turn the captured groups into JSON; raises UnsupportedStateError by path, before anything is written."""
    return {name: {"kind": group.kind, "tree": encode(group.tree, name)} for name, group in captured.groups.items()}


def flush(store: Store, attempt: Attempt, plan: SnapshotPlan, rank: int = 0) -> Part:
    """Write a snapshot's images and digest them in the same pass; every object is durable when this returns."""
    prefix = attempt_prefix(attempt)
    with ThreadPoolExecutor(2 * _WRITERS, thread_name_prefix="ckpt-flush") as pool:
        writes = [pool.submit(store.put, prefix + image.name, [image.bytes]) for image in plan.images]
        digests = [pool.submit(_digest, image, prefix + image.name) for image in plan.images]
    _raise_first(writes)
    found = [digest.result() for digest in digests]
    return Part(rank, tuple(row for rows, _ in found for row in rows), tuple(record for _, record in found))


def seal(store: Store, saving: Saving, parts: Sequence[Part]) -> Sealed:
    """Check what the ranks wrote and write index and manifest; everything but the ledger entry is durable then.

    Raises IntegrityError where a rank, a region or a byte is missing, and StoreError.
    """
    rows, objects = _combine(parts, saving.world_size)
    prefix = attempt_prefix(saving.attempt)
    for record in objects:
        size_bytes = store.size(record.name)
        if size_bytes != record.size_bytes:
            raise IntegrityError(f"an object has {size_bytes} bytes of {record.size_bytes}", key=record.name)
    data = write_index(rows)
    _check_size(data, MAX_INDEX_BYTES, "index")
    index = ObjectRecord(prefix + INDEX_NAME, len(data), digest_hex(data), len(data))
    store.put(index.name, [data])
    manifest = Manifest(
        run_key=saving.run_key,
        step=saving.attempt.step,
        attempt=saving.attempt.name,
        world_size=saving.world_size,
        index=index,
        objects=tuple(objects),
        groups=saving.groups,
        metrics=dict(saving.metrics),
        created_at=now_iso(),
        environment={
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": str(torch.get_num_threads()),
        },
    )
    body = manifest.to_bytes()
    _check_size(body, MAX_MANIFEST_BYTES, "manifest")
    store.put(prefix + MANIFEST_NAME, [body])
    return Sealed(manifest, digest_hex(body), len(body))


def commit(history: History, saving: Saving, sealed: Sealed, cost_s: float, deleted: frozenset[str]) -> Checkpoint:
    """Put the ledger entry: the one instant at which the checkpoint begins to exist.

    `cost_s` is how long training waited. `deleted` names retired objects that are gone. Raises FencedError or
    StoreError, and then the newest checkpoint is the old one; after CommitUncertainError nobody can know yet. Whatever
    it raises, the objects stay: the entry may still arrive.
    """
    manifest = sealed.manifest
    made: list[Checkpoint] = []
    named = {record.name for record in (*manifest.objects, manifest.index)}

    def change(state: State, n: int) -> State:
        gone = named.intersection(state.retired)
        if gone:
            raise StateError("the checkpoint names an object that has been retired", key=min(gone), step=manifest.step)
        checkpoint = Checkpoint(
            step=manifest.step,
            attempt=manifest.attempt,
            manifest=attempt_prefix(saving.attempt) + MANIFEST_NAME,
            manifest_digest=sealed.digest,
            parent=saving.parent,
            n=n,
            metrics=manifest.metrics,
            size_bytes=sum(r.size_bytes for r in manifest.objects) + manifest.index.size_bytes + sealed.size_bytes,
            objects=len(manifest.objects) + 2,
            saved_at=manifest.created_at,
            cost_s=round(cost_s, 6),
            epochs=saving.epochs,
        )
        made[:] = [checkpoint]
        return state.with_checkpoint(checkpoint, deleted)

    history.append({"kind": "commit", "step": manifest.step}, change, owner=saving.owner)
    return made[0]


def discard(store: Store, attempt: Attempt) -> None:
    """Delete what an attempt wrote that failed before its commit; what cannot be deleted is swept by a later owner."""
    with suppress(CkptError):
        for name in store.names(attempt_prefix(attempt)):
            store.delete(name)


def _check_size(data: bytes, most: int, what: str) -> None:
    # What a reader would refuse must not be committed.
    if len(data) > most:
        raise UnsupportedStateError(
            f"the checkpoint's {what} would have {len(data)} bytes, more than the {most} that are read",
            hint="Keep large values in tensors.",
        )


def _combine(parts: Sequence[Part], world_size: int) -> tuple[list[IndexRow], list[ObjectRecord]]:
    ranks = sorted(part.rank for part in parts)
    if ranks != list(range(world_size)):
        raise IntegrityError(f"ranks {ranks} handed in their parts, 0 to {world_size - 1} were expected")
    rows = [row for part in sorted(parts, key=lambda part: part.rank) for row in part.rows]
    faults = coverage_faults(rows)
    if faults:
        raise IntegrityError(f"what the ranks wrote does not make whole tensors: {'; '.join(faults[:5])}")
    return rows, [record for part in parts for record in part.objects]


def _digest(image: Image, name: str) -> tuple[list[IndexRow], ObjectRecord]:
    rows = [row for slot in image.layout.slots for row in _rows(image, slot, name)]
    header = image.layout.header
    return rows, ObjectRecord(name, image.layout.size_bytes, digest_hex(header), len(header))


def _rows(image: Image, slot: Slot, name: str) -> list[IndexRow]:
    spec = slot.spec
    return [
        IndexRow(
            image.group, spec.name, spec.dtype, spec.shape, box, name, begin, end, digest_bytes(image.bytes[begin:end])
        )
        for box, begin, end in slot.regions()
    ]


def _raise_first(writes: Sequence[Future[None]]) -> None:
    errors = [error for write in writes if (error := write.exception()) is not None]
    for error in errors:
        if not isinstance(error, StoreError):
            raise error
    if errors:
        raise errors[0]
