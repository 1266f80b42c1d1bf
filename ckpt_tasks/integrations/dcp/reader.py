"""A StorageReader of DCP for any run: `dcp.load(state, storage_reader=CkptReader("runs/x"))`.

Invariants

1. Every byte that a rank needs is verified while DCP makes its plan: before any rank's target changes. Bytes that are
   read into the targets afterwards are digested again.
2. DCP's load planner unpickles the bytes of every value that is not a tensor. This process makes these bytes in memory,
   from a value that it has read as JSON: no pickle comes from storage (docs/internals/decisions/0095).
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt_tasks.checkpoint.restore.boxes import meets
from ckpt_tasks.checkpoint.restore.download import DownloadedTensors
from ckpt_tasks.checkpoint.restore.fetch import StoredTensors
from ckpt_tasks.checkpoint.restore.reading import run_of
from ckpt_tasks.checkpoint.transfer.placing import regions_of
from ckpt_tasks.errors import StateError
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.format.layout.regions import Box
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.format.tree import TensorRef, tensor_refs
from ckpt_tasks.integrations.dcp.dcp_names import ROOT, flat_state
from ckpt_tasks.integrations.dcp.holding import RestoredState, restored
from ckpt_tasks.integrations.dcp.writer import step_of
from ckpt_tasks.run.ledger.config import CheckpointConfig, config_of
from ckpt_tasks.run.opening import Opened, check_header, open_checkpoint
from ckpt_tasks.state.tensors.packing import unpack
from ckpt_tasks.state.tensors.tensor_sources import Maker, TensorSource
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.port import Store
from ckpt_tasks.system import system


class _Open(NamedTuple):
    """A checkpoint that is being restored: its values by DCP's names, and the regions of each tensor."""

    store: Store
    chosen: RestoredState
    opened: Opened
    values: Mapping[str, Any]
    rows: Mapping[str, Sequence[IndexRow]]


class _Read(NamedTuple):
    """Verified data for one plan: its items, their values, and the source of tensors with a key for each item."""

    items: Sequence[ReadItem]
    values: Mapping[str, Any]
    source: TensorSource
    keys: Sequence[str | None]


class CkptReader(StorageReader):
    """Read a checkpoint of a run into a DCP state: the newest one, or the one of `step`.

    `run` is a directory, a URL, a Location or a CheckpointConfig. If DCP saved the checkpoint, its names are DCP's.
    Otherwise a name is the group and the keys in it, joined by dots. With `group`, only this group is read, by names
    without the group. A number at the end of DCP's `checkpoint_id` (`…/step-100`) is a step, too. A damaged checkpoint
    is refused, in every rank, before any target changes.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Location | CheckpointConfig,
        *,
        step: int | None = None,
        group: str | None = None,
    ):
        super().__init__()
        self._config = config_of(run)
        self._step = self._given = step
        self._id: str | os.PathLike[str] | None = None
        self.load_id = system().token_hex(16)  # As DCP's own reader has it.
        self._group = group
        self._open: _Open | None = None
        self._read: _Read | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open checkpoint, so that another process opens it itself."""
        return {**vars(self), "_open": None, "_read": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if a checkpoint_id ends with a step."""
        return step_of(checkpoint_id) is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of the step at the end of `checkpoint_id` if it has one."""
        self._open = self._read = None
        self._id = checkpoint_id
        if checkpoint_id is not None and self._given is None:
            self._step = step_of(checkpoint_id)

    def read_metadata(self) -> Metadata:  # If this took kwargs, DCP would ask each rank for its own metadata.
        """Open the checkpoint, and describe it as DCP's metadata."""
        run = run_of(self._config)
        live = run.checkpoints()
        checkpoint = run.find("latest" if self._step is None else self._step)
        store = run.history.store
        opened = open_checkpoint(store, checkpoint)
        values, paths = flat_state(opened.groups, opened.manifest.environment.get(ROOT), self._group)
        rows = regions_of(opened, opened.tensors)
        chosen = RestoredState(checkpoint, max(one.n for one in live))
        self._open, self._read = _Open(store, chosen, opened, values, rows), None
        metadata: dict[str, STORAGE_TYPES] = {
            name: _tensor(rows[value.key]) if _is_tensor(value) else BytesStorageMetadata()
            for name, value in values.items()
        }
        about = StorageMeta(self._id or store.url, save_id=str(checkpoint.step), load_id=self.load_id)
        known = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # torch 2.6 has no versions.
        version = {"version": known} if known else {}
        return Metadata(metadata, planner_data=paths, storage_meta=about, **version)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify every byte that this rank needs; raise IntegrityError or StoreError."""
        assert self._open is not None
        self._read = _verified(self._open, plan.items)
        return replace(plan, storage_data=self._open.chosen.checkpoint)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise StateError if ranks have opened different checkpoints, since a newer one was committed meanwhile."""
        chosen: list[Checkpoint] = [plan.storage_data for plan in plans]
        if len({one.manifest_digest for one in chosen}) > 1:
            steps = sorted({one.step for one in chosen})
            raise StateError(f"ranks have found different checkpoints, of steps {steps}", hint="Load again.")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the verified bytes into the planner's targets; raise StateError for a target of another shape."""
        assert self._open is not None
        if self._read is None or self._read.items != plan.items:
            self._read = _verified(self._open, plan.items)
        read, self._read = self._read, None
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        pairs: list[tuple[torch.Tensor, str]] = []
        for item, key in zip(plan.items, read.keys, strict=True):
            if key is not None:
                into = planner.resolve_tensor(item).detach()
                if into.shape != item.lengths:
                    where = item.dest_index.fqn
                    raise StateError(f"the target has {tuple(into.shape)} of {tuple(item.lengths)}", key=where)
                targets.append((item, into))
                pairs.append((into, key))
        read.source.copy(pairs)
        for item, into in targets:
            planner.commit_tensor(item, into)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _in_memory(read.values[item.storage_index.fqn]))
        restored[self._open.store.url] = self._open.chosen
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _is_tensor(value: Any) -> bool:
    return type(value) is TensorRef and not value.array


def _tensor(rows: Sequence[IndexRow]) -> TensorStorageMetadata:
    """Describe a tensor to DCP: each part that a rank wrote is one chunk."""
    by_object: dict[str, list[Box]] = {}
    for row in rows:
        by_object.setdefault(row.object, []).append(row.box)
    chunks = []
    for boxes in by_object.values():
        ends = [map(sum, zip(box.offset, box.shape, strict=True)) for box in boxes]
        begin = [min(one) for one in zip(*(box.offset for box in boxes), strict=True)]
        shape = [max(end) - at for end, at in zip(zip(*ends, strict=True), begin, strict=True)]
        chunks.append(ChunkStorageMetadata(torch.Size(begin), torch.Size(shape)))
    properties = TensorProperties(dtype=getattr(torch, rows[0].dtype))
    return TensorStorageMetadata(properties, torch.Size(rows[0].tensor_shape), chunks)


def _verified(checkpoint: _Open, items: Sequence[ReadItem]) -> _Read:
    """Verify the bytes that the items need, and make their values; tensors are read again, into their targets."""
    keys: list[str | None] = []
    rows: list[IndexRow] = []
    needed: set[str] = set()
    for number, item in enumerate(items):
        value = checkpoint.values[item.storage_index.fqn]
        if item.type == LoadItemType.BYTE_IO:
            needed.update(ref.key for ref in tensor_refs(value))
            keys.append(None)
        else:
            box = _box(item)
            rows += (_seen_from(row, box, number) for row in checkpoint.rows[value.key] if meets(row, [box]))
            keys.append(f"{value.key} ({number})")
    whole = [row for key in needed for row in checkpoint.rows[key]]
    used = {row.object for row in (*rows, *whole)}
    for record in checkpoint.opened.manifest.objects:
        if record.name in used:
            check_header(checkpoint.store, record)
    kind = StoredTensors if checkpoint.store.near else DownloadedTensors
    inner = kind(checkpoint.store, whole)
    make = Maker(inner)
    names = [item.storage_index.fqn for item in items if item.type == LoadItemType.BYTE_IO]
    values = {name: unpack(checkpoint.values[name], make) for name in names}
    inner.fetch()
    source = kind(checkpoint.store, rows)
    source.fetch()
    return _Read([*items], values, source, keys)


def _box(item: ReadItem) -> Box:
    """Return the box of a tensor that an item reads."""
    begin = item.storage_index.offset or (0,) * len(item.lengths)
    return Box(tuple(map(int.__add__, begin, item.storage_offsets)), tuple(item.lengths))


def _seen_from(row: IndexRow, box: Box, number: int) -> IndexRow:
    """Return a region as if the tensor were only the box of an item, so that the target holds it whole."""
    offset = tuple(at - begin for at, begin in zip(row.box.offset, box.offset, strict=True))
    return row._replace(key=f"{row.key} ({number})", tensor_shape=box.shape, box=Box(offset, row.box.shape))


def _in_memory(value: Any) -> io.BytesIO:
    """Return the bytes that DCP's load planner unpickles; they are never stored or read from storage."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
