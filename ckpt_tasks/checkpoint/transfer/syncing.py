"""Copy checkpoints of a run to another store, verified and resumable; the copy is a run in its own right.

Invariants

1. A checkpoint is committed at the target only after the target has all of its objects, and every byte has been
   compared with its digest: during the transfer, or at the target.
2. Names and bytes of objects stay the same. The target has its own ledger, which commits in the source's order, so the
   newest checkpoint is the same in both runs.
3. While a checkpoint is copied, it is leased at the source, and this process owns the target.
4. A checkpoint that the target has retired is not committed there again. An object that the target has given up is not
   copied again: its deletion may still be under way. The copy deletes nothing at the target.
5. A killed copy leaves orphans: the owner epoch at the target is above the epoch in every copied name. A repeated copy
   finds these objects and uses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckpt_tasks.checked import checked
from ckpt_tasks.checkpoint.restore.leasing import renewed_lease
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.checkpoint.transfer.sync_diff import SyncDiff, find_sync_diff
from ckpt_tasks.checkpoint.transfer.transfer import Moved, OnProgress, Transfer
from ckpt_tasks.errors import (
    CheckpointNotFoundError,
    CkptError,
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    StateError,
)
from ckpt_tasks.format.keys import MAX_EPOCH, fold, parse_attempt
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.manifest import MAX_MANIFEST_BYTES, Manifest, ObjectRecord
from ckpt_tasks.format.records import Checkpoint, Evaluation, Owner
from ckpt_tasks.process import in_threads
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import SYNCED, Head, History
from ckpt_tasks.run.ledger.ownership import Heartbeat, acquire, damage, identify, release
from ckpt_tasks.run.ledger.timeline import steps_of
from ckpt_tasks.run.opening import by_object, open_checkpoint
from ckpt_tasks.storage.port import ReadableStore, Store

_IN_FLIGHT = 8
_HOLDER = "ckpt sync"
_MAX_EPOCH = MAX_EPOCH // 10  # Refuse copied names with higher epochs: the target's own owners need higher ones.


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """The checkpoints to copy: all live checkpoints of the source, or `only` one.

    `head` is the head of the source's ledger. `size_bytes` estimates how many bytes must be read: from the target for
    objects that an earlier try copied, from the source for all others.
    """

    run_key: str
    head: Head
    only: Checkpoint | None
    diff: SyncDiff
    size_bytes: int

    @property
    def chosen(self) -> list[Checkpoint]:
        """The requested checkpoints, in the order of the source's commits."""
        return sorted(self.head.state.live, key=lambda c: c.n) if self.only is None else [self.only]


class SyncRow(NamedTuple):
    """The outcome for one checkpoint: `copied_bytes` were sent, `found_bytes` had been copied by an earlier try.

    `outcome` is "copied", "there already" or "pruned there" (at the target), "pruned meanwhile" or "damaged" (at the
    source), or "refused": the target has given up an object of the checkpoint, or has other bytes under its name.
    """

    checkpoint: Checkpoint
    outcome: str
    copied_bytes: int = 0
    found_bytes: int = 0
    fault: str | None = None


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The outcome of a copy; `faults` has a text for everything that could not be copied, with the reason."""

    rows: tuple[SyncRow, ...]
    evaluations: int = 0
    pins: int = 0
    faults: tuple[str, ...] = ()


@checked
def plan_sync(source: Run, target: Store, only: Checkpoint | None = None) -> SyncPlan:
    """Plan a copy of all checkpoints that the target lacks, or of `only`; write nothing.

    Raises RunMismatchError if the target has another run, or checkpoints that the source never had; StateError if the
    target has pruned `only`; ConfigError if source and target are the same.
    """
    check_apart(source.history.store.url, target.url)
    head, history = source.head(), History(target)
    key = source.run_key or _run_key(source.history.store, head)
    there = _look(history, key)
    diff = find_sync_diff(source.history, head, history, there, only)
    if only is not None and only.manifest_digest in diff.pruned:
        raise StateError(
            f"{target.url} has had this checkpoint and pruned it, and no name is used twice",
            step=only.step,
            hint="Copy it to another directory.",
        )
    missing = [c for c in diff.ranked if c.manifest_digest in diff.missing]
    size_bytes = _size_bytes(source.history.store, missing, there.state)
    return SyncPlan(run_key=key, head=head, only=only, diff=diff, size_bytes=size_bytes)


@checked
def run_sync(
    source: Run,
    target: Store,
    plan: SyncPlan,
    *,
    single_writer: bool = False,
    on_progress: OnProgress = lambda size_bytes: None,
) -> SyncReport:
    """Own the target, make the plan again, and execute it; write nothing if the target lacks nothing.

    `on_progress` gets the size in bytes of every read. The report names the checkpoints that were not copied: they are
    damaged or pruned at the source, or the target has given up their objects or has other bytes. Any other failure is
    raised; call again to continue the copy. Raises OwnedError if a process that may be alive owns the target.
    """
    if plan.diff.nothing:
        return SyncReport(rows=tuple(_row(plan, checkpoint) for checkpoint in plan.chosen))
    history = History(target)
    history.create(plan.run_key, single_writer=single_writer)
    with _owned(source, history, plan) as (owner, owned_plan):
        given_up = owned_plan.diff.given_up
        with Transfer(source.history.store, target, history.head().state, on_progress, given_up) as objects:
            return _Copy(source, history, owner, owned_plan, objects).run()


class _Copy:
    """One copy in progress; this process owns the target."""

    def __init__(self, source: Run, target: History, owner: Owner, plan: SyncPlan, objects: Transfer):
        self._source, self._target, self._owner, self._plan, self._objects = source, target, owner, plan, objects
        self._faults: list[str] = []

    def run(self) -> SyncReport:
        """Copy and commit checkpoints in order; then record evaluations, pins, and how far this copy has come."""
        diff = self._plan.diff
        rows: dict[str, SyncRow] = {}
        last_n = -1
        for checkpoint in diff.ranked:
            if checkpoint.manifest_digest in diff.missing:
                row, n = self._copy(checkpoint)
                rows[checkpoint.manifest_digest] = row
                last_n = last_n if n is None else n
            elif checkpoint.n > last_n:
                last_n = checkpoint.n
            else:
                last_n = self._commit(self._target, checkpoint)
        there = self._target.head().state.by_identity
        recorded = [self._record(evaluation) for evaluation in diff.evaluations if evaluation.manifest_digest in there]
        pins = {digest: why for digest, why in diff.pins.items() if digest in there}
        for digest, why in pins.items():
            self._pin(digest, why)
        self._note()
        return SyncReport(
            rows=tuple(rows.get(c.manifest_digest) or _row(self._plan, c) for c in self._plan.chosen),
            evaluations=sum(recorded),
            pins=len(pins),
            faults=(*(row.fault for row in rows.values() if row.fault), *self._faults),
        )

    def _copy(self, checkpoint: Checkpoint) -> tuple[SyncRow, int | None]:
        store = self._source.history.store
        moved = Moved()
        try:
            with renewed_lease(self._source, checkpoint, _HOLDER) as renew:
                records = []
                for record, rows in _contents(store, checkpoint, self._plan.run_key):
                    renew()
                    moved = moved.plus(self._objects.bring(record, rows))
                    records.append(record)
        except CheckpointNotFoundError:
            return SyncRow(checkpoint, "pruned meanwhile"), None
        except StateError as error:
            return _moved(checkpoint, "refused", moved, error), None
        except (IntegrityError, ObjectNotFoundError) as error:
            if all(c.manifest_digest != checkpoint.manifest_digest for c in self._source.checkpoints()):
                return _moved(checkpoint, "pruned meanwhile", moved), None
            return _moved(checkpoint, "damaged", moved, error), None
        self._objects.check(records)
        n = self._commit(self._source.history, checkpoint)
        return _moved(checkpoint, "copied", moved), n

    def _commit(self, history: History, checkpoint: Checkpoint) -> int:
        """Put a checkpoint's entry, with the facts about its save from the entry in `history`; return the number."""
        digest = checkpoint.manifest_digest
        source_state = self._plan.head.state
        known = source_state.by_identity

        def change(state: State, n: int) -> State:
            others = replace(state, live=tuple(c for c in state.live if c.manifest_digest != digest))
            after = others.with_checkpoint(replace(checkpoint, n=n), frozenset())
            # Take `abandoned` from the source: the target may lack checkpoints that show which lines are abandoned.
            live = tuple(replace(c, abandoned=known.get(c.manifest_digest, c).abandoned) for c in after.live)
            # A copy has the origin, the parameters and the program of the source.
            return replace(
                after, live=live, origin=source_state.origin, params=source_state.params, program=source_state.program
            )

        said = _said(history, checkpoint)
        if history is not self._target:
            said = self._with_steps(said, checkpoint)
        event = {**said, "kind": "commit", "step": checkpoint.step}
        return self._target.append(event, change, owner=self._owner).n

    def _with_steps(self, event: Mapping[str, Any], checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Copy the table of steps that an event names; return the event, without the table if the copy fails."""
        table = steps_of(event, checkpoint.step)
        others = {name: value for name, value in event.items() if name != "steps"}
        good = table is not None and self._bring_table(*table, f"metrics of the steps up to {checkpoint.step}")
        return event if good else others

    def _bring_table(self, name: str, digest: str, what: str) -> bool:
        try:
            size_bytes = self._source.history.store.size(name)
            self._objects.bring(ObjectRecord(name, size_bytes, digest, size_bytes), ())
        except (IntegrityError, ObjectNotFoundError, StateError) as error:
            self._faults.append(f"{what}: {error}")
            return False
        return True

    def _record(self, evaluation: Evaluation) -> bool:
        subject = f"evaluation {evaluation.suite} of step {evaluation.step}"
        if not self._bring_table(evaluation.table, evaluation.table_digest, subject):
            return False
        event = {"kind": "evaluation", "suite": evaluation.suite, "step": evaluation.step}
        self._target.append(event, lambda state, n: state.with_evaluation(evaluation), owner=self._owner)
        return True

    def _pin(self, digest: str, why: str) -> None:
        step = next(c.step for c in self._plan.chosen if c.manifest_digest == digest)
        event = {"kind": "pin", "step": step, "reason": why}
        self._target.append(event, lambda state, n: state.with_pin(digest, why), owner=self._owner)

    def _note(self) -> None:
        """Record how far this copy has come, so that the next one need not read older entries."""
        head = self._plan.head
        assert head.entry is not None  # The head has a checkpoint, so it has an entry.
        pruned, given_up = sorted(self._plan.diff.pruned), sorted(fold(self._plan.diff.given_up))
        event = {
            "kind": "note",
            "note": SYNCED,
            "from": self._source.history.store.url,
            "entry": head.entry.n,
            "entry_digest": head.digest,
            **({"pruned": pruned} if pruned else {}),
            **({"given_up": given_up} if given_up else {}),
        }
        self._target.append(event, lambda state, n: state, owner=self._owner)


def _contents(
    store: ReadableStore, checkpoint: Checkpoint, run_key: str
) -> Iterator[tuple[ObjectRecord, Sequence[IndexRow]]]:
    """Yield every object of a checkpoint with its regions; index and manifest come last."""
    opened = open_checkpoint(store, checkpoint)
    opened.check_trees()
    manifest = opened.manifest
    if manifest.run_key != run_key:
        raise IntegrityError(f"the manifest is of the run {manifest.run_key!r:.80}", key=checkpoint.manifest)
    rows = by_object(opened.rows)
    yield from ((record, rows.get(record.name, ())) for record in manifest.objects)
    yield manifest.index, ()
    size_bytes = store.size(checkpoint.manifest)
    yield ObjectRecord(checkpoint.manifest, size_bytes, checkpoint.manifest_digest, size_bytes), ()


@contextmanager
def _owned(source: Run, history: History, plan: SyncPlan) -> Iterator[tuple[Owner, SyncPlan]]:
    """Own the target during the block, in an epoch above those in all copied names; yield the owner and a new plan."""
    history.check(plan.run_key)
    damage(history)
    state = plan.head.state
    best = (state.best_metric, state.best_mode)
    owner = acquire(history, identify(None), take_over=False, timeout_s=CheckpointConfig.owner_timeout_s, best=best)
    heartbeat: Heartbeat | None = None
    try:
        plan = plan_sync(source, history.store, plan.only)
        owner = _risen(history, owner, plan)
        heartbeat = Heartbeat(history, owner, CheckpointConfig.owner_timeout_s)
        yield owner, plan
    finally:
        if heartbeat is not None:
            heartbeat.stop()
        release(history, owner)


def _risen(history: History, owner: Owner, plan: SyncPlan) -> Owner:
    """Raise the owner epoch above the epochs in all copied names, so that a killed copy leaves orphans.

    Appends no entry if the owner's epoch is high enough. Raises ConfigError if a copied epoch is above `_MAX_EPOCH`.
    """
    attempts = [parse_attempt(c.manifest) for c in plan.diff.ranked]
    epoch = max((attempt.epoch for attempt in attempts if attempt), default=0)
    if owner.epoch > epoch:
        return owner
    if epoch > _MAX_EPOCH:
        raise ConfigError(f"{epoch} owners, as the names of objects say, are more than a run has had")
    risen = replace(owner, epoch=epoch + 1)
    because = f"what it copies was written by owners up to epoch {epoch}"
    event = {"kind": "owner", "because": because, "pid": owner.pid, "host": owner.host}
    history.append(event, lambda state, n: replace(state, owner=risen), owner=owner)
    return risen


def _look(history: History, run_key: str) -> Head:
    """Check the target's run key and return its head; return an empty head if the target is not a run yet."""
    try:
        history.check(run_key)
    except CheckpointNotFoundError:
        return Head(None, None, 0, ())
    return history.head()


def _run_key(store: ReadableStore, head: Head) -> str:
    """Return the run key from a manifest, because the run's format.json is damaged."""
    if not head.state.live:
        raise IntegrityError(f"the run of {store.url} is unknown: format.json is damaged")
    return open_checkpoint(store, head.state.live[-1]).manifest.run_key


def _size_bytes(store: ReadableStore, missing: Sequence[Checkpoint], there: State) -> int:
    """Estimate how many bytes the copy must read."""
    sizes: dict[str, int] = {}

    def look(checkpoint: Checkpoint) -> None:
        with suppress(IntegrityError, ObjectNotFoundError):  # The copy will report this fault.
            data = store.get(checkpoint.manifest, MAX_MANIFEST_BYTES)
            manifest = Manifest.from_bytes(data, digest=checkpoint.manifest_digest, name=checkpoint.manifest)
            for record in (*manifest.objects, manifest.index):
                sizes[record.name] = record.size_bytes
            sizes[checkpoint.manifest] = len(data)

    in_threads(look, missing, _IN_FLIGHT, "ckpt-sync")
    return sum(size_bytes for name, size_bytes in sizes.items() if not there.keeps(name))


def _moved(checkpoint: Checkpoint, outcome: str, moved: Moved, error: CkptError | None = None) -> SyncRow:
    fault = None if error is None else f"step {checkpoint.step}: {error}"
    return SyncRow(checkpoint, outcome, moved.sent_bytes, moved.found_bytes, fault)


def _row(plan: SyncPlan, checkpoint: Checkpoint) -> SyncRow:
    """Return the outcome of a checkpoint that was not copied."""
    return SyncRow(checkpoint, "pruned there" if checkpoint.manifest_digest in plan.diff.pruned else "there already")


def _said(history: History, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the event of the entry that committed a checkpoint; {} if it cannot be read."""
    if (good := history.good_entry(checkpoint.n)) is None:
        return {}
    event = good[0].event
    return event if (event["kind"], event.get("step")) == ("commit", checkpoint.step) else {}


def check_apart(source: str, target: str) -> None:
    """Raise ConfigError if two locations are equal, or if one is inside the other."""
    places = [url.rstrip("/") + "/" for url in (source, target)]
    if places[0].startswith(places[1]) or places[1].startswith(places[0]):
        raise ConfigError(f"{target} is not another place than {source}", hint="Name a directory of its own.")
