"""Objects with state_dict and load_state_dict as groups: captured and restored by these methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ckpt_tasks.state.kinds.differences import Differences
from ckpt_tasks.state.kinds.group_parts import Guard
from ckpt_tasks.state.kinds.replaced import replaced_settings
from ckpt_tasks.state.kinds.started import Started, note_changes
from ckpt_tasks.state.tensors.packing import unpack
from ckpt_tasks.state.tensors.tensor_sources import Maker


class StatefulPart:
    """Restores an object through its own load_state_dict."""

    def __init__(self, target: Any, name: str, tree: Any):
        self._target = target
        self._name = name
        self._tree = tree
        self._live = _state_before(target)
        self._value: Any = None
        foreign = type(target).__module__.partition(".")[0] not in ("torch", "ckpt_tasks")
        self.guard: Guard | None = Guard(target, name, self._live, foreign=foreign)

    def compare(self, differences: Differences) -> None:
        """Record a GradScaler that is enabled on one side only: it would ignore the state silently.

        Also records settings of a new schedule that the restore will replace, and changed arguments of the run's start.
        """
        if isinstance(self._target, Started):
            note_changes(self._target, self._live, self._tree, differences)
        if isinstance(self._target, LRScheduler):
            replaced_settings(self._name, self._live, self._tree, differences)
        if isinstance(self._target, torch.amp.GradScaler) and self._target.is_enabled() == (self._tree == {}):
            here, there = ("on", "off") if self._target.is_enabled() else ("off", "on")
            differences.differ(self._name, f"a GradScaler that is {here} here, {there} in the checkpoint")

    def prepare(self, make: Maker) -> None:
        """Make the saved state with new tensors, on the devices of the current tensors."""
        self._value = unpack(self._tree, make, self._live)

    def write(self) -> None:
        """Call load_state_dict, and make a loader's next iterator, which draws from streams that are set later."""
        self._target.load_state_dict(self._value)
        if issubclass(type(self._target), DataLoader):
            _set_epoch(self._target, self._value)
            self._target.state_dict()  # This call makes the iterator that the next iter() returns.


def _state_before(target: Any) -> Any:
    """Return the state of an object before its restore, and put back the attributes that asking for it has set.

    Some loaders begin an iterator in state_dict(), which would yield the first batch whatever is loaded later.
    """
    attributes = getattr(target, "__dict__", {})
    before = dict(attributes)
    try:
        return target.state_dict()
    finally:
        for name in attributes.keys() - before.keys():
            del attributes[name]
        attributes.update(before)


def _set_epoch(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    """Set a Hugging Face stream to the epoch of its saved state, because its workers start before the program can.

    Otherwise the stream ignores the state of another epoch, and starts its own epoch from the beginning.
    """
    workers = (state.get("_snapshot") or {}).get("_worker_snapshots") or {}
    of_dataset = next(iter(workers.values()), state).get("dataset_state") or {}
    tell = getattr(loader.dataset, "set_epoch", None)
    if callable(tell) and isinstance(of_dataset, Mapping) and type(epoch := of_dataset.get("epoch")) is int:
        tell(epoch)
