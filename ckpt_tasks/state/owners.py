"""Who else holds the memory of a plain value: live modules and optimizers, in the state or outside of it.

`module.state_dict()` is a dict of the module's own tensors, so a restore into it restores the module. An optimizer's is
not: its numbers are copies, and its tensors come with the first step. A restore into it would restore nothing, so it is
refused, and so are the state_dicts of schedules and scalers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.state.living import live_objects
from ckpt_tasks.state.values import DICTS

__all__ = ["Owners", "refuse_copies_of_state"]

_CONTAINERS = frozenset({*DICTS, list, tuple, deque})
_OF_OPTIMIZERS = frozenset({"state", "param_groups"})
_OF_OTHERS = {
    "a learning-rate schedule": frozenset({"last_epoch", "_last_lr"}),
    "a GradScaler": frozenset({"scale", "_growth_tracker"}),
}


class Owners:
    """The memory of every module and optimizer that lives in this process.

    The garbage collector lists them: a state gives a dict of tensors, and not the object that holds them too.
    """

    def own(self, value: Any) -> bool:
        """Say whether a tensor or an array lies in the memory of a live module or optimizer."""
        if isinstance(value, np.ndarray):
            return False
        return _memory(value) in self._memories

    @cached_property
    def _memories(self) -> frozenset[tuple[torch.device, int]]:
        holders: list[nn.Module | Optimizer] = [*live_objects(nn.Module), *live_objects(Optimizer)]
        return frozenset(_memory(tensor) for one in holders for tensor in _tensors_of(one))


def refuse_copies_of_state(value: Any, name: str) -> None:
    """Raise UnsupportedStateError where a plain value holds what a `state_dict()` gave and a restore cannot give back.

    A copy of an optimizer's state that a program keeps for itself has tensors that no live optimizer holds.
    """
    for what, keys in _OF_OTHERS.items():
        if type(value) in DICTS and keys <= value.keys():
            _refuse(name, what)
    owners = Owners()
    for path, one in _dicts(value, name):
        if _is_of_an_optimizer(one) and _is_live(one, owners):
            _refuse(path, "an optimizer")
        if isinstance(one, OrderedDict) and hasattr(one, "_metadata"):
            extra = [key for key in one if str(key).endswith("_extra_state")]
            if extra:
                _refuse(f"{path}/{extra[0]}", "a module with an extra state")


def _refuse(path: str, what: str) -> None:
    raise UnsupportedStateError(
        f"this is the state_dict() of {what}, and a restore into it would not reach the object",
        key=path,
        hint="Give the object itself: state={'model': model, 'optimizer': optimizer}.",
    )


def _dicts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind in DICTS:
        yield path, value
        items: Any = value.items()
    elif kind in _CONTAINERS:
        items = enumerate(value)
    else:
        return
    for key, item in items:
        if type(item) in _CONTAINERS:
            yield from _dicts(item, f"{path}/{key}")


def _is_of_an_optimizer(value: Mapping[Any, Any]) -> bool:
    groups = value.get("param_groups") if value.keys() >= _OF_OPTIMIZERS else None
    return isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)


def _is_live(value: Mapping[Any, Any], owners: Owners) -> bool:
    entries = value["state"].values() if isinstance(value["state"], dict) else ()
    tensors = [t for entry in entries if isinstance(entry, dict) for t in entry.values() if isinstance(t, torch.Tensor)]
    return not tensors or any(map(owners.own, tensors))


def _tensors_of(one: nn.Module | Optimizer) -> Iterator[torch.Tensor]:
    if isinstance(one, nn.Module):
        held = vars(one)
        for tensors in (held.get("_parameters"), held.get("_buffers")):
            yield from (t for t in (tensors or {}).values() if _has_memory(t))
    else:
        for entry in vars(one).get("state", {}).values():
            if isinstance(entry, dict):
                yield from (t for t in entry.values() if _has_memory(t))


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
