"""Restore: ledger → manifest → index → the regions wanted → verify → copy into the target, all or nothing.

Invariants

1. Nothing in the target changes until everything that is needed has been read, verified and compared with it.
2. A checkpoint that fails verification is passed over with its reason, and the next older one is tried; a mismatch
   between checkpoint and target is the caller's to settle and is raised.
3. Bytes are digested before they are parsed.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt_tasks.errors import IntegrityError, NoGoodCheckpointError, StateMismatchError, StoreError
from ckpt_tasks.format.digests import digest_bytes, digest_hex
from ckpt_tasks.format.image import MAX_HEADER_BYTES
from ckpt_tasks.format.index import MAX_INDEX_BYTES, IndexRow, coverage_faults, read_index
from ckpt_tasks.format.ledger import Checkpoint
from ckpt_tasks.format.manifest import MAX_MANIFEST_BYTES, Manifest, ObjectRecord
from ckpt_tasks.format.tree import decode
from ckpt_tasks.state.capture import GroupState, plan_restore
from ckpt_tasks.state.snapshot import BufferPool, tensor_at
from ckpt_tasks.storage.port import Store

__all__ = ["Opened", "RestoreReport", "open_checkpoint", "restore_newest", "restore_one"]

_RUN_BYTES = 16 << 20
_READERS = max(2, min(8, os.cpu_count() or 2))


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did: the step, where from, how many tensors and bytes, and which checkpoints it passed over and why.

    `skipped` holds (step, reason), newest first; `damaged` names ledger entries that could not be read.
    """

    step: int
    source: str
    tensors: int
    size_bytes: int
    seconds: float
    skipped: tuple[tuple[int, str], ...] = ()
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Opened:
    """A checkpoint's manifest and index, verified and decoded, before any tensor is read."""

    manifest: Manifest
    rows: tuple[IndexRow, ...]
    groups: Mapping[str, GroupState]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(repr=False)  # full key → dtype, shape


def open_checkpoint(store: Store, checkpoint: Checkpoint) -> Opened:
    """Read manifest and index and check them against each other; raise IntegrityError or StoreError."""
    data = store.get(checkpoint.manifest, MAX_MANIFEST_BYTES)
    manifest = Manifest.from_bytes(data, digest=checkpoint.manifest_digest, name=checkpoint.manifest)
    if manifest.step != checkpoint.step:
        raise IntegrityError(f"the manifest says step {manifest.step}", key=checkpoint.manifest, step=checkpoint.step)
    index = manifest.index
    rows = read_index(store.get(index.name, MAX_INDEX_BYTES), digest=index.digest, name=index.name)
    faults = coverage_faults(rows)
    if faults:
        raise IntegrityError(f"the index has holes: {'; '.join(faults[:5])}", key=index.name, step=checkpoint.step)
    sizes = {record.name: record.size_bytes for record in manifest.objects}
    for row in rows:
        if row.end > sizes.get(row.object, -1):
            raise IntegrityError("a region lies outside of its object", key=row.full_key, step=checkpoint.step)
    groups = {name: GroupState(str(g.get("kind")), decode(g.get("tree"))) for name, g in manifest.groups.items()}
    return Opened(manifest, tuple(rows), groups, {row.full_key: (row.dtype, row.tensor_shape) for row in rows})


def restore_newest(
    store: Store,
    candidates: Iterable[Checkpoint],
    state: dict[str, Any],
    pool: BufferPool,
    *,
    partial: bool = False,
    damaged: tuple[str, ...] = (),
) -> tuple[Checkpoint, RestoreReport]:
    """Restore the first candidate that verifies; raise NoGoodCheckpointError with every reason where none does."""
    skipped: list[tuple[int, str]] = []
    for checkpoint in candidates:
        try:
            report = restore_one(store, checkpoint, state, pool, partial=partial)
        except (IntegrityError, StoreError) as error:
            skipped.append((checkpoint.step, str(error)))
            continue
        return checkpoint, RestoreReport(**{**vars(report), "skipped": tuple(skipped), "damaged": damaged})
    raise NoGoodCheckpointError(
        f"none of the {len(skipped)} checkpoints of {store.url} can be restored",
        reasons=tuple(skipped),
        hint="The target is untouched. `ckpt verify` lists the damage.",
    )


def restore_one(
    store: Store, checkpoint: Checkpoint, state: dict[str, Any], pool: BufferPool, *, partial: bool = False
) -> RestoreReport:
    """Restore one checkpoint into the target; `partial`: only the groups that the target names, and no random streams.

    Raises IntegrityError or StoreError where its bytes are not good and StateMismatchError where it does not fit; the
    target is untouched then.
    """
    started = time.perf_counter()
    opened = open_checkpoint(store, checkpoint)
    try:
        plan = plan_restore(state, opened.groups, opened.tensors, partial=partial, rng=not partial)
    except StateMismatchError as error:
        error.step = checkpoint.step
        raise
    wanted = [row for row in opened.rows if row.full_key in plan.keys]
    names = {row.object for row in wanted} if partial else {record.name for record in opened.manifest.objects}
    records = [record for record in opened.manifest.objects if record.name in names]
    buffers = {record.name: pool.take(record.size_bytes) for record in records}
    try:
        read_verified(store, records, wanted, buffers)
        plan.apply(_views(wanted, buffers))
    finally:
        for buffer in buffers.values():
            pool.give(buffer)
    return RestoreReport(
        step=checkpoint.step,
        source=f"{store.url}/{checkpoint.manifest.rpartition('/')[0]}",
        tensors=len(plan.keys),
        size_bytes=sum(row.end - row.begin for row in wanted),
        seconds=time.perf_counter() - started,
    )


def read_verified(
    store: Store, records: Sequence[ObjectRecord], rows: Sequence[IndexRow], buffers: Mapping[str, mmap.mmap]
) -> None:
    """Read regions to their places in the buffers, several at once, and verify sizes, headers and every region's digest."""
    by_object: dict[str, list[IndexRow]] = {record.name: [] for record in records}
    for row in rows:
        by_object[row.object].append(row)
    jobs = [(record.name, run) for record in records for run in merge_runs(by_object[record.name])]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="ckpt-restore") as threads:
        checks = [threads.submit(check_header, store, record) for record in records]
        reads = [threads.submit(_read_run, store, name, run, memoryview(buffers[name])) for name, run in jobs]
        try:
            for done in (*checks, *reads):
                done.result()
        finally:
            for waiting in reads:
                waiting.cancel()


def check_header(store: Store, record: ObjectRecord) -> None:
    """Check an object's size and the digest of its header."""
    size_bytes = store.size(record.name)
    if size_bytes != record.size_bytes:
        raise IntegrityError(f"the object has {size_bytes} bytes of {record.size_bytes}", key=record.name)
    if record.digested_bytes > min(size_bytes, MAX_HEADER_BYTES + 8):
        raise IntegrityError("the header is larger than any that is written", key=record.name)
    header = bytearray(record.digested_bytes)
    store.read(record.name, 0, memoryview(header))
    if digest_hex(bytes(header)) != record.digest:
        raise IntegrityError("the header's bytes have changed", key=record.name)


def merge_runs(rows: Iterable[IndexRow]) -> list[list[IndexRow]]:
    """Group regions that follow each other in one object into reads of at most 16 MiB."""
    runs: list[list[IndexRow]] = []
    for row in sorted(rows, key=lambda row: row.begin):
        run = runs[-1] if runs else None
        if run and run[-1].end == row.begin and row.end - run[0].begin <= _RUN_BYTES:
            run.append(row)
        else:
            runs.append([row])
    return runs


def verify_run(run: Sequence[IndexRow], data: memoryview) -> list[str]:
    """Say which tensors of a run have changed bytes; `data` begins where the run does."""
    start = run[0].begin
    return [
        f"{row.full_key}: bytes {row.begin}–{row.end} of {row.object} have changed"
        for row in run
        if digest_bytes(data[row.begin - start : row.end - start]) != row.digest
    ]


def _read_run(store: Store, name: str, run: Sequence[IndexRow], buffer: memoryview) -> None:
    data = buffer[run[0].begin : run[-1].end]
    store.read(name, run[0].begin, data)
    faults = verify_run(run, data)
    if faults:
        raise IntegrityError(faults[0])


def _views(rows: Sequence[IndexRow], buffers: Mapping[str, mmap.mmap]) -> dict[str, torch.Tensor]:
    # A tensor's regions lie one after the other in one object, so its first region is where it begins.
    first: dict[str, IndexRow] = {}
    for row in rows:
        if row.full_key not in first or row.begin < first[row.full_key].begin:
            first[row.full_key] = row
    return {key: tensor_at(buffers[row.object], row.dtype, row.tensor_shape, row.begin) for key, row in first.items()}
