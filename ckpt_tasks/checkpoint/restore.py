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
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_tasks.checkpoint.opening import Opened, check_header, merge_runs, open_checkpoint, verify_run
from ckpt_tasks.errors import (
    FormatVersionError,
    IntegrityError,
    NoGoodCheckpointError,
    ObjectNotFoundError,
    RunMismatchError,
    StateMismatchError,
)
from ckpt_tasks.format.index import IndexRow
from ckpt_tasks.format.ledger import Checkpoint
from ckpt_tasks.format.manifest import ObjectRecord
from ckpt_tasks.state.capture import GroupState, plan_restore
from ckpt_tasks.state.snapshot import BufferPool, tensor_at
from ckpt_tasks.storage.port import Store

__all__ = ["Opened", "RestoreReport", "open_checkpoint", "restore_newest", "restore_one"]

_READERS = max(2, min(8, os.cpu_count() or 2))


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did: the step, where from, how many tensors and bytes, and what it passed over and why.

    `skipped` holds (step, reason), newest first; `damaged` names ledger entries that could not be read.
    """

    step: int
    source: str
    tensors: int
    size_bytes: int
    seconds: float
    skipped: tuple[tuple[int, str], ...] = ()
    damaged: tuple[str, ...] = ()


def restore_newest(
    store: Store,
    candidates: Iterable[Checkpoint],
    state: dict[str, Any],
    pool: BufferPool,
    *,
    partial: bool = False,
    run_key: str | None = None,
    damaged: tuple[str, ...] = (),
) -> tuple[Checkpoint, RestoreReport]:
    """Restore the first candidate that verifies; raise NoGoodCheckpointError with every reason where none does.

    A store that fails (StoreError) is no damaged checkpoint: that is raised, for a retry to try the newest again.
    """
    skipped: list[tuple[int, str]] = []
    for checkpoint in candidates:
        try:
            report = restore_one(store, checkpoint, state, pool, partial=partial, run_key=run_key)
        except (IntegrityError, ObjectNotFoundError) as error:
            skipped.append((checkpoint.step, str(error)))
            continue
        return checkpoint, RestoreReport(**{**vars(report), "skipped": tuple(skipped), "damaged": damaged})
    raise NoGoodCheckpointError(
        f"none of the {len(skipped)} checkpoints of {store.url} can be restored",
        reasons=tuple(skipped),
        hint="The target is untouched. `ckpt verify` lists the damage.",
    )


def restore_one(
    store: Store,
    checkpoint: Checkpoint,
    state: dict[str, Any],
    pool: BufferPool,
    *,
    partial: bool = False,
    run_key: str | None = None,
) -> RestoreReport:
    """Restore one checkpoint into the target; `partial`: only the groups that the target names, and no random streams.

    Raises IntegrityError or StoreError where its bytes are not good, StateMismatchError where it does not fit, and
    RunMismatchError where it is not of the run `run_key`; the target is untouched then.
    """
    started = time.perf_counter()
    opened = open_checkpoint(store, checkpoint)
    if run_key not in (None, opened.manifest.run_key):
        raise RunMismatchError(f"the checkpoint is of the run {opened.manifest.run_key!r}", step=checkpoint.step)
    try:
        groups = {name: GroupState(*saved) for name, saved in opened.groups.items()}
        plan = plan_restore(state, groups, opened.tensors, partial=partial, rng=not partial)
    except StateMismatchError as error:
        error.step = checkpoint.step
        raise
    wanted = [row for row in opened.rows if row.full_key in plan.keys]
    names = {row.object for row in wanted} if partial else {record.name for record in opened.manifest.objects}
    records = [record for record in opened.manifest.objects if record.name in names]
    for record in records:
        check_header(store, record)  # before memory is taken by what the manifest says
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
    """Read regions to their places in the buffers, several at once, and verify every region's digest."""
    by_object: dict[str, list[IndexRow]] = {record.name: [] for record in records}
    for row in rows:
        by_object[row.object].append(row)
    jobs = [(record.name, run) for record in records for run in merge_runs(by_object[record.name])]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="ckpt-restore") as threads:
        reads = [threads.submit(_read_run, store, name, run, memoryview(buffers[name])) for name, run in jobs]
        try:
            for done in reads:
                done.result()
        finally:
            for waiting in reads:
                waiting.cancel()


def _read_run(store: Store, name: str, run: Sequence[IndexRow], buffer: memoryview) -> None:
    data = buffer[run[0].begin : run[-1].end]
    store.read(name, run[0].begin, data)
    faults = verify_run(run, data)
    if faults:
        raise IntegrityError(faults[0])


def _views(rows: Sequence[IndexRow], buffers: Mapping[str, mmap.mmap]) -> dict[str, torch.Tensor]:
    # One rank wrote whole tensors: a tensor's regions lie one after the other in one object.
    first: dict[str, IndexRow] = {}
    ends: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: (row.object, row.begin)):
        if row.full_key not in first:
            first[row.full_key] = row
        elif row.object != first[row.full_key].object or row.begin != ends[row.full_key]:
            raise FormatVersionError(
                "the tensor is cut over several objects, which this version cannot put together",
                key=row.full_key,
                hint="Upgrade ckpt-tasks.",
            )
        ends[row.full_key] = row.end
    return {key: tensor_at(buffers[row.object], row.dtype, row.tensor_shape, row.begin) for key, row in first.items()}
