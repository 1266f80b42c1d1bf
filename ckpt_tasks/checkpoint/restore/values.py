"""A checkpoint as plain values and tensors, for callers that have no objects to restore into."""

from __future__ import annotations

from typing import Any, NamedTuple

from ckpt_tasks.checkpoint.restore.download import DownloadedTensors
from ckpt_tasks.checkpoint.restore.fetch import StoredTensors
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.format.saved_kinds import RNG
from ckpt_tasks.format.tree import tensor_refs
from ckpt_tasks.run.opening import check_header, open_checkpoint
from ckpt_tasks.state.tensors.packing import unpack
from ckpt_tasks.state.tensors.tensor_sources import Maker
from ckpt_tasks.storage.port import Store


class Values(NamedTuple):
    """The value of one group, with its tensors on the CPU; `kind` is its kind in the manifest."""

    kind: str
    value: Any


def read_values(store: Store, checkpoint: Checkpoint) -> dict[str, Values]:
    """Read every group of a checkpoint except the random streams; every byte is verified.

    Raises IntegrityError and StoreError. If many ranks saved the checkpoint, the values of rank 0 are read.
    """
    opened = open_checkpoint(store, checkpoint)
    groups = {name: group for name, group in opened.groups.items() if name != RNG}
    trees = {name: group.tree for name, group in groups.items()}
    rows = opened.index.of_tensors(frozenset(ref.key for tree in trees.values() for ref in tensor_refs(tree))).rows
    used = {row.object for row in rows}
    for record in opened.manifest.objects:
        if record.name in used:
            check_header(store, record)
    source = (StoredTensors if store.near else DownloadedTensors)(store, rows)
    make = Maker(source)
    made = {name: Values(group.kind, unpack(trees[name], make)) for name, group in groups.items()}
    source.fetch()
    return made
