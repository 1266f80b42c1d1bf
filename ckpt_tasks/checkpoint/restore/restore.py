"""Restore: ledger → manifest → index → the wanted regions → verify → read into the target, all or nothing.

Invariants

1. Nothing in the target changes until the whole checkpoint has been compared with it, in all ranks: manifest, index,
   sizes, headers, tiling, structure. The bytes of live tensors are then read once, into place, and verified there; with
   foreign code in the restore, and for a part, they are verified before.
2. A checkpoint that fails verification is skipped with its reason, and the next older one is tried, which overwrites
   everything; a mismatch between checkpoint and target is raised, since only the caller can resolve it.
3. Bytes are digested before they are parsed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ckpt_tasks.checkpoint.ranks.exchange import ALONE, Exchange, Together, all_or_none
from ckpt_tasks.checkpoint.restore.download import DownloadedTensors
from ckpt_tasks.checkpoint.restore.fetch import StoredTensors
from ckpt_tasks.errors import (
    IntegrityError,
    NoGoodCheckpointError,
    ObjectNotFoundError,
    RunMismatchError,
    StateError,
)
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.layout.index import Index, IndexRow
from ckpt_tasks.format.manifest import ObjectRecord
from ckpt_tasks.format.records import Checkpoint, Seal
from ckpt_tasks.format.saved_kinds import RNG
from ckpt_tasks.run.opening import Opened, check_header, open_checkpoint
from ckpt_tasks.state.restoring import RestorePlan, plan_restore
from ckpt_tasks.state.selection import Selection
from ckpt_tasks.state.tensors.random_streams import seed_streams
from ckpt_tasks.state.tensors.tensor_sources import TensorSource
from ckpt_tasks.storage.port import ReadableStore, Store
from ckpt_tasks.system import system

_log = logging.getLogger("ckpt_tasks")
HALF_RESTORED = "The state is half restored: restore again before anything else is done with it."


class HostSnapshot(Protocol):
    """A complete snapshot on this host, in memory or in a local directory."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The snapshot's committed checkpoint, or the one that its commit would create."""

    @property
    def seal(self) -> Seal:
        """The seal of this rank's part."""

    @property
    def store(self) -> ReadableStore:
        """The store that has the snapshot's objects."""

    @property
    def place(self) -> str:
        """Where the snapshot is, in words for the log."""

    def open(self) -> Opened:
        """Read and check the manifest and index of the snapshot."""

    def tensors(self, store: Any, rows: Sequence[IndexRow]) -> TensorSource:
        """Return the tensors of these `rows` from the snapshot."""


_Snapshot = TypeVar("_Snapshot", bound=HostSnapshot)


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did: step, source, number of tensors and bytes, and what it skipped and why.

    `skipped` holds (step, reason), newest first; `damaged` names ledger entries that could not be read.
    `derived_streams`: another number of ranks saved the checkpoint, so all ranks but 0 derive new random streams. A
    loose restore lists the names that it has `taken` and that it `left` in the checkpoint; `new` names values of the
    state that were kept. A name is a group, or a key of a group that was taken in part. `replaced` has a line for each
    setting that the restore has replaced (a learning rate, the length of a schedule, with an integration also the batch
    size), for each plain value of another kind, and for each top-level tensor of another shape or dtype. `seconds`
    includes `verify_s` for what is read and verified before the first change, and `copy_s` for the rest.
    """

    step: int
    source: str
    tensors: int
    size_bytes: int
    seconds: float
    skipped: tuple[tuple[int, str], ...] = ()
    damaged: tuple[str, ...] = ()
    derived_streams: bool = False
    taken: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    verify_s: float = 0.0
    copy_s: float = 0.0


def of_checkpoints(in_memory: Sequence[_Snapshot], checkpoints: Iterable[Checkpoint]) -> list[_Snapshot]:
    """Return the snapshots that belong to one of these checkpoints."""
    digests = {checkpoint.manifest_digest for checkpoint in checkpoints}
    return [snapshot for snapshot in in_memory if snapshot.checkpoint.manifest_digest in digests]


def restore_newest(
    store: Store,
    candidates: Iterable[Checkpoint],
    state: Mapping[str, Any],
    *,
    partial: bool = False,
    selection: Selection | None = None,
    run_key: str | None = None,
    damaged: tuple[str, ...] = (),
    in_memory: Sequence[_Snapshot] = (),
    ranks: Exchange = ALONE,
    topic: str = "restore",
    deadline_s: float = 0.0,
    writing: Callable[[], object] = lambda: None,
) -> tuple[Checkpoint, RestoreReport, _Snapshot | None]:
    """Restore the first candidate that verifies; raise NoGoodCheckpointError with every reason if none does.

    `in_memory` are snapshots of this host, in memory or in a local directory: snapshots that storage lacks are tried
    first; every other snapshot is tried before the same checkpoint in storage. All `ranks` restore the same checkpoint,
    or no rank restores any; `topic` names their agreement. Returns the checkpoint, the report, and the snapshot that
    was used (None: storage).

    `writing` is called before the first live tensor changes; an error after that says that the state is half restored.
    A failing store does not mean a damaged checkpoint: StoreError is raised, so that a retry tries the newest again.
    """
    skipped, wrote = list[tuple[int, str]](), list[None]()

    def begin() -> None:
        wrote.append(None)
        writing()

    for number, (checkpoint, cached) in enumerate(_sources(candidates, in_memory)):
        try:
            with all_or_none(ranks, f"{topic}/{number}", deadline_s) as together:
                report = restore_one(
                    store,
                    checkpoint,
                    state,
                    partial=partial,
                    selection=selection,
                    run_key=run_key,
                    snapshot=cached,
                    together=together,
                    writing=begin,
                )
                together()  # All have verified what they have read, and none still copies from its slot.
        except (IntegrityError, ObjectNotFoundError) as error:
            skipped.append((checkpoint.step, f"{cached.place}: {error}" if cached else str(error)))
            _log.warning("Step %d is passed over: %s", *skipped[-1])
            continue
        except BaseException as error:
            if wrote:
                error.add_note(HALF_RESTORED)
            raise
        report = RestoreReport(**{**vars(report), "skipped": tuple(skipped), "damaged": damaged})
        _log_restored(report, checkpoint, cached)
        return checkpoint, report, cached
    hint = f"{HALF_RESTORED if wrote else 'The target is untouched.'} `ckpt verify` lists the damage."
    why = f"none of the {len(skipped)} checkpoints of {store.url} can be restored"
    raise NoGoodCheckpointError(why, reasons=tuple(skipped), hint=hint)


def _log_restored(report: RestoreReport, checkpoint: Checkpoint, cached: HostSnapshot | None) -> None:
    if cached is None:
        place, why = "storage", "this host has no good copy of it"
    else:
        place = cached.place.removeprefix("in ")
        why = "storage does not have it yet" if checkpoint.n < 0 else "storage has it too, and would be slower"
    passed = f"; passed over before it: {len(report.skipped)}" if report.skipped else ""
    _log.info(
        "Restored step %d from %s, as %s: %.1f MiB in %.2f s, %s%s",
        report.step,
        place,
        why,
        report.size_bytes / 2**20,
        report.seconds,
        report.source,
        passed,
    )


def _sources(
    candidates: Iterable[Checkpoint], in_memory: Sequence[_Snapshot]
) -> Iterator[tuple[Checkpoint, _Snapshot | None]]:
    committed = list(candidates)
    known = {checkpoint.manifest_digest for checkpoint in committed}
    yield from ((g.checkpoint, g) for g in in_memory if g.checkpoint.manifest_digest not in known)
    for checkpoint in committed:
        yield from ((checkpoint, g) for g in in_memory if g.checkpoint.manifest_digest == checkpoint.manifest_digest)
        yield checkpoint, None


def restore_one(
    store: ReadableStore,
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    *,
    partial: bool = False,
    selection: Selection | None = None,
    run_key: str | None = None,
    snapshot: HostSnapshot | None = None,
    together: Together | None = None,
    writing: Callable[[], object] | None = None,
) -> RestoreReport:
    """Restore one checkpoint into `state`; with `partial` only the groups that `state` names, and no random streams.

    `selection` restores a part. With `writing`, which is called before the first live tensor changes, all are read once
    if no rank's state has foreign code and all of it is restored. The bytes come from `snapshot` if it is not None.
    `together` are the ranks that restore at once. If another number of ranks saved the checkpoint, each rank but 0
    seeds its random streams from rank 0's streams and its own number.

    Raises IntegrityError or StoreError if the bytes are not good, StateMismatchError if the checkpoint does not fit,
    RunMismatchError if it is not of the run `run_key`; the target is unchanged then, unless `writing` was called.
    """
    started, together = system().monotonic(), together or Together(ALONE)
    rank, world_size = together.rank, together.size
    if snapshot is not None:
        store, opened = snapshot.store, snapshot.open()
    else:
        opened = open_checkpoint(store, checkpoint, rank, world_size)
    if run_key not in (None, opened.manifest.run_key):
        raise RunMismatchError(f"the checkpoint is of the run {opened.manifest.run_key!r}", step=checkpoint.step)
    with _naming(checkpoint.step):
        plan = _plan(opened, checkpoint, state, (rank, world_size), partial=partial, selection=selection)
    with plan.lazy.undone():
        wanted = opened.index.of_tensors(plan.keys).rows
        whole = selection is None and not partial
        names = None if whole else {row.object for row in wanted}
        headers = [record for record in opened.manifest.objects if names is None or record.name in names]
        _check_headers(store, headers if snapshot is not None else headers[rank::world_size], opened.index)
        stored = StoredTensors if store.near else DownloadedTensors
        source = snapshot.tensors(store, wanted) if snapshot is not None else stored(store, wanted, together)
        once = _agreed(together, writing if whole and plan.is_simple else None)
        verify_s, copy_s = _apply(plan, source, together, checkpoint.step, once)
    derived = RNG in plan.chosen.groups and world_size != opened.manifest.world_size
    if derived and rank:
        saved = canonical_json(dict(opened.manifest.groups[RNG]))  # Rank 0's streams.
        seed_streams(int(digest_hex(saved + str(rank).encode())[:16], 16))
    return RestoreReport(
        step=checkpoint.step,
        source=f"{store.url}/{checkpoint.manifest.rpartition('/')[0]}",
        tensors=len(plan.keys),
        size_bytes=sum(row.end - row.begin for row in wanted),
        seconds=system().monotonic() - started,
        verify_s=verify_s,
        copy_s=copy_s,
        derived_streams=derived,
        taken=plan.chosen.taken,
        left=plan.chosen.left,
        new=plan.chosen.new,
        replaced=plan.replaced,
    )


def _plan(
    opened: Opened,
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    place: tuple[int, int],
    *,
    partial: bool,
    selection: Selection | None,
) -> RestorePlan:
    saved_by = opened.manifest.world_size
    return plan_restore(
        state,
        opened.groups,
        opened.tensors,
        partial=partial,
        rng=not partial,
        selection=selection,
        of_ranks=None if saved_by == place[1] else saved_by,
        place=place,
        home=checkpoint.manifest_digest if checkpoint.n >= 0 else None,  # None: the checkpoint is not in storage yet.
    )


def _agreed(together: Together, writing: Callable[[], object] | None) -> Callable[[], object] | None:
    """Return `writing` if every rank has one, so that all read once or none does."""
    if together.size == 1:
        return writing
    return writing if together(b"" if writing is None else b"once", min) else None


def _apply(
    plan: RestorePlan, source: TensorSource, together: Together, step: int, writing: Callable[[], object] | None
) -> tuple[float, float]:
    """Apply a restore plan; return how long the time before the first change took, and the rest."""
    began_s, verified_s = system().monotonic(), list[float]()

    def confirm() -> None:
        verified_s.append(system().monotonic())
        together()

    with _naming(step):  # Add the step to an error of the user's load_state_dict.
        plan.apply(source, confirm, writing)
    return verified_s[0] - began_s, system().monotonic() - verified_s[0]


@contextmanager
def _naming(step: int) -> Iterator[None]:
    """Add the step of the checkpoint to an error that the block raises."""
    try:
        yield
    except StateError as error:
        error.step = step
        raise


def _check_headers(store: ReadableStore, records: Iterable[ObjectRecord], index: Index) -> None:
    for record in records:
        _check_header(store, record, index)


def _check_header(store: ReadableStore, record: ObjectRecord, index: Index) -> None:
    """Check an object's size and header; the error also names the tensors that are lost."""
    try:
        check_header(store, record)
    except (IntegrityError, ObjectNotFoundError) as error:
        lost = index.of_object(record.name).rows
        if lost:
            more = f" and {len(lost) - 1} more regions" if len(lost) > 1 else ""
            error.message += f"; it holds {lost[0].full_key} (bytes {lost[0].begin}–{lost[0].end}){more}"
        raise
