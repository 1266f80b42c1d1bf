"""Who else holds the memory of a plain value: a module or an optimizer, in the state or outside of it.

`module.state_dict()` is a dict of the module's own tensors, so a restore into it restores the module. An optimizer's is
not: its numbers are copies, and its tensors come with the first step. A restore into it would restore nothing, so it is
refused, and so are the state_dicts of schedules and scalers.

Who holds a tensor is not looked for: a list of all live objects, as the garbage collector gives it, makes
`tuple(x for x in …)` fail in every other thread, and takes half a second in a large process.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.state.values import DICTS

__all__ = ["belongs_to_another", "refuse_copies_of_state"]

_CONTAINERS = frozenset({*DICTS, list, tuple, deque})
_OF_OPTIMIZERS = frozenset({"state", "param_groups"})
_OF_OTHERS = {
    "a learning-rate schedule": frozenset({"last_epoch", "_last_lr"}),
    "a GradScaler": frozenset({"scale", "_growth_tracker"}),
}


def belongs_to_another(value: Any) -> bool:
    """Say whether a tensor is another one's whole memory under a second name, as `state_dict()` gives parameters."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
        return False
    if value._base is not None or value.untyped_storage().nbytes() != value.nbytes:
        return False  # a view: its base holds the memory
    return _uses(value) > _uses(torch.empty(1))


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def refuse_copies_of_state(value: Any, name: str) -> None:
    """Raise UnsupportedStateError where a plain value holds what a `state_dict()` gave and a restore cannot give back.

    A copy of an optimizer's state that a program keeps for itself has tensors that no live optimizer holds.
    """
    for what, keys in _OF_OTHERS.items():
        if type(value) in DICTS and keys <= value.keys():
            _refuse(name, what)
    for path, one in _dicts(value, name):
        if _is_of_an_optimizer(one) and _is_live(one):
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


def _is_live(value: Mapping[Any, Any]) -> bool:
    """Say whether a live optimizer holds what it keeps for its parameters, or has none yet to keep."""
    entries = value["state"]
    return not entries or max(_references(entries)) > max(_references({0: {}}))


def _references(entries: Mapping[Any, Any]) -> list[int]:
    return [sys.getrefcount(entry) for entry in entries.values()]
