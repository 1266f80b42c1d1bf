"""The last steps of a commit: write a prepared checkpoint's index and manifest, then put the ledger entry.

Invariants (MUST: breaking one loses data)

1. Every object is durable before the manifest is written, and the manifest before the ledger entry is put.
2. The entry is put only when every expected rank has delivered its part, the regions of every tensor tile its box
   exactly, and every object has its expected size.
3. Every object's name holds the attempt's own nonce: no save ever writes into another save's objects.
4. Any failure of any writer is raised, and then nothing is committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ckpt_tasks.checkpoint.save.prepared import PreparedCheckpoint
from ckpt_tasks.errors import CkptError, IntegrityError, StateError
from ckpt_tasks.format.keys import MANIFEST_NAME, Attempt, attempt_prefix
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.upkeep.retiring import Retirement
from ckpt_tasks.storage.port import Store


def write_index_and_manifest(store: Store, prepared: PreparedCheckpoint) -> None:
    """Check every object's size, then write index and manifest; after that only the ledger entry is missing.

    Raises IntegrityError if an object has another size, and StoreError.
    """
    manifest = prepared.manifest
    sizes = store.sizes([record.name for record in manifest.objects])
    for record, size_bytes in zip(manifest.objects, sizes, strict=True):
        if size_bytes != record.size_bytes:
            raise IntegrityError(f"an object has {size_bytes} bytes of {record.size_bytes}", key=record.name)
    store.put(manifest.index.name, [prepared.index_bytes])
    store.put(attempt_prefix(prepared.saving.attempt) + MANIFEST_NAME, [prepared.manifest_bytes])


def commit(
    history: History,
    prepared: PreparedCheckpoint,
    *,
    parent: str | None,
    cost_s: float,
    retirement: Retirement,
    observed: Mapping[str, object],
) -> Entry:
    """Put the ledger entry: at this instant the checkpoint begins to exist, as the newest live one.

    `cost_s`: how long training waited. `retirement`: the older checkpoints that the entry retires. `observed`: facts
    for the entry's event, for people and for the cadence. Raises StateError if the checkpoint names a retired object.
    After FencedError or StoreError this checkpoint is not committed; after CommitUncertainError it may be committed.
    The objects stay after an error, since the entry may still reach the store.
    """
    manifest = prepared.manifest
    named = [record.name for record in (*manifest.objects, manifest.index)]

    def change(state: State, n: int) -> State:
        # Only objects of live checkpoints are sure to exist: the ledger may no longer list an object that was retired.
        gone = [*filter(state.has_retired, named), *(name for name in prepared.reuses if not state.keeps(name))]
        if gone:
            raise StateError("the checkpoint names an object that has been retired", key=min(gone), step=manifest.step)
        checkpoint = prepared.checkpoint(parent=parent, n=n, cost_s=cost_s)
        return retirement.apply(state.with_checkpoint(checkpoint, frozenset()))

    event = {**observed, "kind": "commit", "step": manifest.step}
    if retirement.checkpoints:
        event["retires"] = retirement.checkpoints
    return history.append(event, change, owner=prepared.saving.owner)


def discard(store: Store, attempt: Attempt) -> None:
    """Delete the objects of an attempt that failed before its commit; a later owner deletes what remains."""
    with suppress(CkptError):
        store.delete_all(store.names(attempt_prefix(attempt)))
