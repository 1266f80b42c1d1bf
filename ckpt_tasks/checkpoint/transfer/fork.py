"""Fork: a new run that begins with a checkpoint of another run, and with changed parameters.

Invariants

1. The first ledger entry of a fork holds the checkpoint, its origin and the parameters, and is put if absent: a fork
   exists whole or not at all. Before this entry no process can train in the directory, which has objects but no ledger.
2. All objects that the entry names are durable before the entry is put. If two forks have one target, one of them wins.
3. During the copy the checkpoint is leased at the source; the lease is two entries of its ledger, so whatever can be
   checked before (every part is there, the target can be written) is. After the copy neither run uses the other's
   directory, and no change of one run is visible in the other run.
4. The owner epoch of a fork's first owner is above the epochs in all copied names, so owners can sweep retired objects.
5. A fork deletes nothing, even if it fails: another process may be about to commit the same fork. A repeated call
   finds the copied objects and continues. If another fork has made the run, its owners sweep these objects as orphans.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from ckpt_tasks.checkpoint.restore.leasing import renewed_lease
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.checkpoint.transfer.syncing import check_apart
from ckpt_tasks.checkpoint.transfer.transfer import Moved, OnProgress, Transfer
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError, ObjectExistsError, StateError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import INDEX_NAME, MAX_EPOCH, is_run_key, parse_attempt
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.manifest import MAX_MANIFEST_BYTES, ObjectRecord
from ckpt_tasks.format.records import Checkpoint, Origin
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.ownership import identify
from ckpt_tasks.run.opening import Opened, by_object, check_header, open_checkpoint
from ckpt_tasks.storage.port import Store

_HOLDER = "ckpt fork"


@dataclass(frozen=True, kw_only=True)
class ForkPlan:
    """A planned fork: its checkpoint, its origin, and the parameters of the new run.

    `opened` is the source's checkpoint. `manifest` has the bytes of the fork's manifest. `done`: the fork exists.
    """

    run_key: str
    source: Checkpoint
    checkpoint: Checkpoint
    origin: Origin
    params: Mapping[str, Any] | None
    opened: Opened
    manifest: bytes
    done: bool

    @property
    def records(self) -> tuple[ObjectRecord, ...]:
        """The objects that are copied unchanged: all except the manifest, which contains the run key."""
        return (self.opened.manifest.index, *self.opened.manifest.objects)


def find_source(source: Run, which: int | str | None, target: Store) -> Checkpoint:
    """Find the checkpoint to fork; `which` is a step, "latest" (also None) or "best".

    If `which` is not a step and an earlier fork to `target` was killed, returns that fork's checkpoint, even if the
    source has newer checkpoints. Raises what `Run.find` raises.
    """
    if not isinstance(which, int):
        there = set(target.names(""))
        for checkpoint in source.checkpoints():
            if f"{checkpoint.manifest.rpartition('/')[0]}/{INDEX_NAME}" in there:  # A fork copies the index first.
                return checkpoint
    return source.find("latest" if which is None else which)


def plan_fork(
    source: Run, checkpoint: Checkpoint, target: Store, changed: Mapping[str, Any], run_key: str | None = None
) -> ForkPlan:
    """Plan a fork of a checkpoint to `target` with changed parameters; write nothing.

    Raises ConfigError for an invalid run key or parameter, StateError if the target has another run or objects of other
    checkpoints, and IntegrityError if manifest or index of the checkpoint is damaged.
    """
    url = source.history.store.url
    check_apart(url, target.url)
    key = target.url.rstrip("/").rpartition("/")[2] if run_key is None else run_key
    if not is_run_key(key):
        raise ConfigError(f"{key!r:.80} cannot be a run's key", hint="Name one that can: letters, digits, '_-.'.")
    state = source.head().state
    opened = open_checkpoint(source.history.store, checkpoint)
    opened.check_trees()
    manifest = replace(opened.manifest, run_key=key)
    data, params = manifest.to_bytes(), checked_params(changed)
    digest = digest_hex(data)
    records = (manifest.index, *manifest.objects)
    origin = Origin(
        url=without_user(url),
        run_key=opened.manifest.run_key,
        step=checkpoint.step,
        manifest_digest=checkpoint.manifest_digest,
        identity=digest,
        set=params,
        params=state.params,
    )
    planned = ForkPlan(
        run_key=key,
        source=checkpoint,
        checkpoint=replace(
            checkpoint,
            manifest_digest=digest,
            parent=None,
            n=0,
            abandoned=False,
            interim=False,
            size_bytes=sum(record.size_bytes for record in records) + len(data),
        ),
        origin=origin,
        params={**(state.params or {}), **params} if params or state.params is not None else None,
        opened=opened,
        manifest=data,
        done=False,
    )
    return replace(planned, done=_is_there(History(target), planned))


def run_fork(
    source: Run,
    target: Store,
    plan: ForkPlan,
    *,
    single_writer: bool = False,
    on_progress: OnProgress = lambda size_bytes: None,
) -> Moved:
    """Execute a plan; call again to continue after a kill.

    `on_progress` gets the size in bytes of every read; objects that are linked, or copied by the store, do not count.
    Raises IntegrityError if the source is damaged (the target does not become a run), and StateError if another fork
    has made the run first. After an error, the objects copied so far stay at the target.
    """
    if plan.done:
        return Moved(found_bytes=plan.checkpoint.size_bytes)
    history, rows = History(target), by_object(plan.opened.rows)
    with Transfer(source.history.store, target, State(), on_progress, adopts=True) as transfer:

        def bring(record: ObjectRecord) -> Moved:
            more = transfer.bring(record, rows.get(record.name, ()))
            if more.sent_bytes or more.found_bytes:
                transfer.check([record])
            return more

        for record in plan.opened.manifest.objects:  # Check all headers before the first write.
            check_header(source.history.store, record)
        index, *others = plan.records
        moved = bring(index)  # Copy the index first: from then on no process can begin a run here.
        with renewed_lease(source, plan.source, _HOLDER) as renew:
            for record in others:
                renew()
                moved = moved.plus(bring(record))
            history.create(plan.run_key, single_writer=single_writer)
            history.check(plan.run_key)
            _put_manifest(target, plan)
            open_checkpoint(target, plan.checkpoint)
            _commit(history, plan, source.head().state)
    return moved


def checked_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as JSON data; raise ConfigError for a name or value that JSON cannot hold."""
    wrong = [name for name in params if not (isinstance(name, str) and name.isidentifier())]
    if wrong:
        raise ConfigError(
            f"{wrong[0]!r:.80} is not a parameter's name", hint="A program's parameters have plain names."
        )
    try:
        parsed: dict[str, Any] = json.loads(json.dumps(dict(params), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the parameters cannot be written as JSON: {error}") from error
    return parsed


def without_user(url: str) -> str:
    """Return a store's URL without its user, password and query, which may be secret."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _is_there(history: History, plan: ForkPlan) -> bool:
    """Return True if the target is this fork and has had no other owner yet; False if the target is not a run.

    The fork may have evaluations, pins and results of checks: any process may record them. Raises StateError
    if the target is another run, or has objects of other checkpoints.
    """
    with suppress(CheckpointNotFoundError):
        history.check(plan.run_key)
    head, url = history.head(), history.store.url
    if head.next_n == 0:
        names = {record.name for record in plan.records} | {plan.checkpoint.manifest}
        strange = [name for name in history.store.names("") if parse_attempt(name) and name not in names]
        if strange:
            hint = "Give another directory, or remove this one: it may be a run whose ledger is lost."
            raise StateError(f"{url} holds other checkpoints' objects", key=strange[0], hint=hint)
        return False
    origin, owner = head.state.origin, head.state.owner
    is_new = owner is not None and owner.epoch == _first_epoch(plan.records)
    if is_new and origin is not None and replace(origin, url=plan.origin.url) == plan.origin:
        return True
    begun = f", forked from {origin.url} at step {origin.step}" if origin else ""
    raise StateError(f"{url} is a run already{begun}", hint="Give the fork a directory of its own.")


def _put_manifest(target: Store, plan: ForkPlan) -> None:
    name = plan.checkpoint.manifest
    with suppress(ObjectExistsError):  # An earlier try or another process may have put the same manifest.
        target.put_if_absent(name, plan.manifest)
    if digest_hex(target.get(name, MAX_MANIFEST_BYTES)) != plan.checkpoint.manifest_digest:
        raise StateError("another manifest lies there", key=name, hint="Give the fork a directory of its own.")


def _commit(history: History, plan: ForkPlan, parent: State) -> None:
    """Put the ledger entry that makes the run exist."""
    # The first owner is this process, which has released the run.
    owner = replace(identify(None, _first_epoch(plan.records)), released=True)

    def change(state: State, n: int) -> State:
        if n > 0:
            hint = "Give the fork a directory of its own."
            raise StateError(f"{history.store.url} has become a run meanwhile", hint=hint)
        return State(
            owner=owner,
            live=(plan.checkpoint,),
            best_metric=parent.best_metric,
            best_mode=parent.best_mode,
            origin=plan.origin,
            params=plan.params,
            program=parent.program,
        )

    history.append({"kind": "commit", "step": plan.checkpoint.step}, change, owner=None)


def _first_epoch(records: Sequence[ObjectRecord]) -> int:
    """Return the owner epoch of a fork's first owner: one above the highest epoch in the names of its objects."""
    attempts = [parse_attempt(record.name) for record in records]
    epoch = 1 + max(attempt.epoch for attempt in attempts if attempt)
    if epoch >= MAX_EPOCH:
        raise ConfigError(f"the source has had {epoch} owners, the most there can be")
    return epoch
