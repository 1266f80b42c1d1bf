"""A StorageWriter of DCP that commits checkpoints of a run: `dcp.save(state, storage_writer=CkptWriter("runs/x"))`.

DCP's own collectives carry the messages. The coordinator takes the run and names the attempt when it has all plans;
every rank packs its values, digests its tensors and puts its shards; the coordinator commits all parts. An error of any
rank is raised in all of them; then nothing is committed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt_tasks.checkpoint.save.parts import RankPart, Saving
from ckpt_tasks.checkpoint.save.schedule import check_step
from ckpt_tasks.errors import ConfigError, UnsupportedStateError
from ckpt_tasks.format.keys import Attempt
from ckpt_tasks.format.tree import TensorRef
from ckpt_tasks.integrations.dcp.dcp_names import ROOT, Naming, groups_of, name_all
from ckpt_tasks.integrations.dcp.holding import (
    RestoredState,
    begin_turn,
    end_turn,
    expect_turn,
    held_run,
    restored,
    store_of,
)
from ckpt_tasks.integrations.dcp.shards import Portion, write_portions
from ckpt_tasks.integrations.dcp.staged_state import Staged, stage
from ckpt_tasks.run.ledger.config import CheckpointConfig, config_of
from ckpt_tasks.state.tensors.packing import pack
from ckpt_tasks.state.tensors.tensors import TensorSet
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.system import system

_STEP = re.compile(r"(\d+)/?$")
_lock = system().lock()


class _Order(NamedTuple):
    """The coordinator's message to a rank: where and how to write, and which empty tensors other ranks write."""

    attempt: Attempt
    rank: int
    world_size: int
    places: Mapping[str, str]  # Maps DCP's name to a tensor's full key, or to a value's path.
    total_bytes: int
    total_items: int
    skipped: frozenset[str]


@dataclass(frozen=True)
class _Written:
    """A rank's message to the coordinator: its part, and its packed values by DCP's names."""

    part: RankPart
    values: Mapping[str, Any]


class CkptWriter(StorageWriter, AsyncStager):
    """Write a DCP state as a checkpoint of a run, committed and verified like any other.

    `run` is a directory, a URL, a Location or a CheckpointConfig; its retention applies. `step` defaults to the number
    at the end of DCP's `checkpoint_id` (`…/step-100`). The process of DCP's coordinator holds the run from its first
    save until the process ends. Errors reach the caller inside DCP's CheckpointException, as with its own writers.
    """

    _synchronize_after_execute = False  # `stage` returns when the copy is made.

    def __init__(self, run: str | os.PathLike[str] | Location | CheckpointConfig, *, step: int | None = None):
        StorageWriter.__init__(self)
        self._config = config_of(run)
        self._step = self._given = step
        self._id: str | os.PathLike[str] | None = None
        self._coordinates = True
        self._saving: Saving | None = None
        self._naming: Naming | None = None
        self._restored: RestoredState | None = None
        self._staged: Staged | None = None
        self._copies = 0  # The copies whose saves have not written them yet.

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the state for dcp.async_save, while training waits."""
        copied, staged = stage(state_dict)
        expect_turn(self._url)
        with _lock:  # With several copies under way a save does not know which one is its own: none is used again.
            self._staged = staged if self._copies == 0 else None
            self._copies += 1
        return copied

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` returns when the copy is made."""

    def close(self) -> None:
        """Do nothing: the memory is kept for the next save."""

    def __getstate__(self) -> dict[str, Any]:
        """Include the checkpoint that this process restored: with DCP's PROCESS executor another process saves."""
        url = store_of(self._config).url
        return {**vars(self), "_restored": restored.pop(url, self._restored), "_staged": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if a checkpoint_id ends with a step."""
        return step_of(checkpoint_id) is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, of the step at the end of `checkpoint_id` if it has one."""
        step = self._step if checkpoint_id is None or self._given is not None else step_of(checkpoint_id)
        begin_turn(self._url, -1 if step is None else step)
        self._saving = self._naming = None
        self._step, self._id = step, checkpoint_id

    def storage_meta(self) -> StorageMeta:
        """Return what DCP's planners are told: the checkpoint_id, and the step as the id of this save."""
        return StorageMeta(checkpoint_id=self._id, save_id=self.save_id)

    @property
    def save_id(self) -> str | None:
        """The step as a text, by which DCP's metadata names a save; None before there is one."""
        return None if self._step is None else str(self._step)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise ConfigError if there is no step or ranks do not save together, StateError if the step is invalid."""
        self._coordinates = is_coordinator
        if self._step is None:
            raise ConfigError(
                "a checkpoint needs its step",
                hint="Write CkptWriter(run, step=…), or a checkpoint_id such as step-100.",
            )
        check_step(self._step, 0)
        if not kwargs.get("use_collectives", True):
            raise ConfigError("ranks that save alone have no common checkpoint", hint="Leave use_collectives=True.")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return DCP's plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Take the run, name the attempt, and tell each rank where to write."""
        plans = _full_plans(plans)
        tensors = {item.index.fqn: item.type != WriteItemType.BYTE_IO for plan in plans for item in plan.items}
        naming = self._naming = name_all(tensors, _paths(plans))
        places = {name: naming.keys.get(name) or _place(*naming.places[name]) for name in tensors}
        held = held_run(self._config)
        newer, self._restored = restored.pop(held.url, self._restored), None
        assert self._step is not None
        self._saving = held.begin(self._step, len(plans), newer)
        total_bytes, total_items, empty = 0, 0, set[str]()
        orders = []
        for rank, plan in enumerate(plans):
            skipped = set[str]()
            for item in plan.items:
                total_items += 1
                total_bytes += _chunk_bytes(item)
                if item.tensor_data is not None and 0 in item.tensor_data.size:
                    (skipped if item.index.fqn in empty else empty).add(item.index.fqn)
            here = {item.index.fqn: places[item.index.fqn] for item in plan.items}
            orders.append((rank, plan, here, frozenset(skipped)))
        return [
            replace(
                plan,
                storage_data=_Order(self._saving.attempt, rank, len(plans), here, total_bytes, total_items, skipped),
            )
            for rank, plan, here, skipped in orders
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Pack the values, then digest and put the tensors; raise UnsupportedStateError before anything is put."""
        order: _Order = plan.storage_data
        inner = TensorSet(None)
        values = {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                name = item.index.fqn
                values[name] = pack(_value(planner, item), order.places[name], inner)
        portions = [
            Portion(key, tensor, tuple(tensor.shape), (0,) * tensor.dim()) for key, tensor in inner.tensors.items()
        ]
        portions += _portions(plan.items, planner, order)
        part = write_portions(
            store_of(self._config),
            order.attempt,
            portions,
            rank=order.rank,
            world_size=order.world_size,
            total_bytes=order.total_bytes,
            total_items=order.total_items,
        )
        with _lock:
            own, self._staged, self._copies = self._staged, None, max(self._copies - 1, 0)
        if own is not None:
            own.free()
        if not self._coordinates:
            end_turn(self._url)
        results = [WriteResult(item.index, _chunk_bytes(item), None) for item in plan.items]
        written = _Written(part, values)
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(MetadataIndex(""), 0, written)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the parts of all ranks as a checkpoint."""
        saving, naming = self._saving, self._naming
        assert saving is not None
        assert naming is not None
        parts, values = [], {name: TensorRef(key) for name, key in naming.keys.items()}
        for result in results:
            written = result[-1].storage_data
            parts.append(written.part)
            values |= written.values
        groups = groups_of(naming, values)
        environment = {ROOT: naming.root}
        held_run(self._config).commit(replace(saving, groups=groups, environment=environment), parts)
        self._saving = self._naming = None
        end_turn(self._url)

    @property
    def _url(self) -> str:
        return store_of(self._config).url


def step_of(checkpoint_id: str | os.PathLike[str]) -> int | None:
    """Return the number at the end of a checkpoint_id; None if there is none."""
    match = _STEP.search(os.fspath(checkpoint_id))
    return int(match[1]) if match else None


def _full_plans(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Return the plans; for a rank that sends none, because its planner has cached it, return that planner's last plan.

    Each save needs a new order, so a rank must not write by a cached plan. DCP keeps the last plans by the name of the
    planner's class, which it tells no writer. Raises ConfigError if several planners could have made these plans.
    """
    if all(getattr(plan, "usable", True) for plan in plans):  # torch 2.6 caches no plans.
        return [*plans]
    kept = [one for one in SavePlanner._cached_global_plan.values() if _may_be(one, plans)]
    if len(kept) != 1:
        raise ConfigError(
            f"DCP's planner has cached its plan, and {len(kept)} planners may have made it",
            hint="Use one class of planner with enable_plan_caching in a process.",
        )
    return [replace(plan, usable=True) for plan in kept[0]]


def _may_be(kept: Sequence[SavePlan], plans: Sequence[SavePlan]) -> bool:
    """Return True if the kept plans of all ranks have the plans that were sent."""
    return len(kept) == len(plans) and all(new is old for old, new in zip(kept, plans, strict=True) if new.usable)


def _paths(plans: Iterable[SavePlan]) -> dict[str, tuple[str | int, ...]] | None:
    """Return DCP's path of every name; None if its planner has not flattened the state."""
    paths: dict[str, tuple[str | int, ...]] = {}
    for plan in plans:
        if not isinstance(plan.planner_data, Mapping):
            return None
        paths |= plan.planner_data
    return paths


def _place(group: str, path: Sequence[str | int]) -> str:
    return "/".join(map(str, (group, *path)))


def _chunk_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _value(planner: SavePlanner, item: WriteItem) -> Any:
    """Return the value of an item that DCP would pickle; raise UnsupportedStateError if only its bytes exist."""
    own = getattr(type(planner), "transform_object", None)
    if not isinstance(planner, DefaultSavePlanner) or own is not DefaultSavePlanner.transform_object:
        raise UnsupportedStateError(
            f"a value that {type(planner).__name__} has made bytes of cannot be stored",
            key=item.index.fqn,
            hint="Give it to a planner whose transform_object is DefaultSavePlanner's.",
        )
    return planner.lookup_object(item.index)


def _portions(items: Sequence[WriteItem], planner: SavePlanner, order: _Order) -> list[Portion]:
    """Return the tensors of a plan; raise UnsupportedStateError if a part has another shape than DCP says."""
    portions = []
    for item in items:
        if item.tensor_data is None or item.index.fqn in order.skipped:
            continue
        tensor: Any = planner.resolve_data(item)
        full, chunk = tuple(item.tensor_data.size), item.tensor_data.chunk
        if tuple(tensor.shape) != tuple(chunk.sizes) and tensor.numel() + chunk.sizes.numel():
            raise UnsupportedStateError(
                f"a part of the shape {tuple(tensor.shape)} where DCP says {tuple(chunk.sizes)} cannot be stored",
                key=item.index.fqn,
                hint="DCP would lose rows of it (github.com/pytorch/pytorch issue 161368); a Checkpointer saves it.",
            )
        if tensor.numel() or 0 in full:
            portions.append(Portion(order.places[item.index.fqn], tensor.detach(), full, tuple(chunk.offsets)))
    return portions
