"""Flat states: containers of objects in a state become one group for each object.

``{"optimizers": [a, b]}`` is captured and restored as ``{"optimizers_0": a, "optimizers_1": b}``. A tuple, a dict with
names as keys and a dataclass are split likewise, if they contain a module, an optimizer or another object with a state.
A container of only plain values is one group.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from operator import setitem
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.format.keys import is_group
from ckpt_tasks.format.saved_kinds import RNG
from ckpt_tasks.format.tree import SCALARS
from ckpt_tasks.state.kinds.kinds import kind_of
from ckpt_tasks.state.tensors.packing import in_place

_CONTAINERS = (dict, OrderedDict, list, tuple)
_WITHOUT_STATE = SCALARS | {torch.Tensor, np.ndarray}
_MOST_LEVELS = 20
_MOST_ITEMS, _MOST_ATTRIBUTES = 50, 3  # Limits of a search: items of a container, and depth.


class ByRank:
    """Mark a part of a state as different in each rank: every rank saves its own value, and the same rank restores it.

    Without ByRank, all values except parameters, buffers, optimizers and random generators must be equal in all ranks.
    `value` is any value that a state may hold, except sharded tensors. Without `others`, another number of ranks cannot
    restore it: the restore raises and names it. In one process ByRank acts as its value::

        state = {"model": model, "metric": ByRank(metric), "replay": ByRank({"seen": 0, "rows": rows})}

    `others` says what another number of ranks restores, for a plain value or an object with a state: a function of the
    saved values by rank (an object's are its states), the rank and the number of ranks; or else the value with which
    additional ranks begin, while the first ones restore their own::

        ByRank(sums, others=lambda saved, rank, ranks: sum(saved) / ranks)
    """

    def __init__(self, value: Any, *, others: Any = None):
        self.value = value
        self.others = others


def flat(state: Mapping[str, Any]) -> Groups:
    """Flatten a state into groups, one for each object.

    Raises UnsupportedStateError for an invalid group name, and for a number or a text in a tuple or a frozen dataclass:
    a restore cannot assign to these.
    """
    if isinstance(state, Groups):
        return state
    _check_names(state)
    groups = Groups()
    for name, value in state.items():
        _add(groups, name, value, _assign_item(state, name), 0)
    _check_names(groups)
    return groups


def objects_of(state: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values in a state, its containers and its dataclasses, except scalars; never raise."""
    waiting = [*state.values()] if isinstance(state, Mapping) else []
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or type(value) in SCALARS:
            continue
        seen.add(id(value))
        yield value
        if type(value) is ByRank:
            waiting.append(value.value)
        elif type(value) in _CONTAINERS:
            waiting.extend(value.values() if isinstance(value, dict) else value)
        elif _is_record(value):
            waiting.extend(getattr(value, field.name) for field in fields(value))


def items_of(value: Any) -> list[tuple[str, Any]]:
    """List the first items of a container, or the attributes of another object, each with its name in Python."""
    if issubclass(type(value), (list, tuple)):
        return [(f"[{n}]", item) for n, item in _items(value)]
    if issubclass(type(value), dict):
        return [(f"[{key!r:.40}]" if type(key) in SCALARS else "[…]", item) for key, item in _items(value)]
    return [(f".{name}", item) for name, item in _items(value)]


def _items(value: Any) -> list[tuple[Any, Any]]:
    kind = type(value)
    if issubclass(kind, (list, tuple)):
        return [*enumerate(value[:_MOST_ITEMS])]
    if issubclass(kind, dict):
        return [*value.items()][:_MOST_ITEMS]
    return [] if issubclass(kind, (type, ModuleType)) else [*getattr(value, "__dict__", {}).items()]


def held_in(
    value: Any, kinds: tuple[type, ...], path: str = "", skip: Callable[[Any], bool] = lambda _: False, level: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for each object of these kinds in a value, at most three levels deep."""
    if issubclass(type(value), kinds):
        yield path, value
    elif level < _MOST_ATTRIBUTES and not skip(value):
        for name, item in items_of(value):
            if type(item) not in _WITHOUT_STATE:
                yield from held_in(item, kinds, path + name, skip, level + 1)


def has_any(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return True if `held_in` finds an object of these kinds; quicker, for it is asked before every batch."""
    level = [value]
    for _ in range(_MOST_ATTRIBUTES):
        level = [item for one in level for _, item in _items(one) if type(item) not in _WITHOUT_STATE]
        if any(issubclass(kind, kinds) for kind in set(map(type, level))):
            return True
    return issubclass(type(value), kinds)


class Groups(MutableMapping[str, Any]):
    """A flat state: its objects and values by group. An assignment to a group assigns to its container.

    Groups in `by_rank` differ between ranks; `others` has what another number of ranks restores of them.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._assign: dict[str, Callable[[Any], None] | None] = {}
        self.by_rank: set[str] = set()
        self.others: dict[str, Any] = {}

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules by group."""
        return {name: value for name, value in self.items() if kind_of(value) == "module"}

    def add(self, name: str, value: Any, assign: Callable[[Any], None] | None) -> None:
        if name in self._values:
            raise UnsupportedStateError("two parts of the state have this name", key=name, hint="Rename one of them.")
        self._values[name], self._assign[name] = value, assign

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        assign = self._assign[name]
        assert assign is not None
        assign(value)
        self._values[name] = value

    def can_assign(self, name: str) -> bool:
        """Return True if a restore can assign a new value to a group."""
        return self._assign[name] is not None

    def __delitem__(self, name: str) -> None:
        raise TypeError("a group of a state stays")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _add(groups: Groups, name: str, value: Any, assign: Callable[[Any], None] | None, level: int) -> None:
    if level > _MOST_LEVELS:
        raise UnsupportedStateError("objects are nested too deep", key=name, hint="Is there a cycle in it?")
    if type(value) is ByRank:
        before = set(groups)
        _add(groups, name, value.value, partial(setattr, value, "value"), level + 1)
        groups.by_rank |= set(groups) - before
        if value.others is not None:
            if name not in groups or kind_of(value.value) not in ("plain", "stateful"):
                hint = "Mark each object by itself: ByRank(object, others=…)."
                raise UnsupportedStateError(
                    "others is for a plain value or an object with a state", key=name, hint=hint
                )
            groups.others[name] = value.others
    elif not _is_record(value) and not (type(value) in _CONTAINERS and _holds_objects(value, 0)):
        if level and assign is None and kind_of(value) == "plain" and not in_place(value):
            hint = "Keep it in a list, a dict or a dataclass that is not frozen: a restore assigns it there."
            raise UnsupportedStateError("what is in a tuple or frozen cannot be assigned", key=name, hint=hint)
        groups.add(name, value, assign)
    elif isinstance(value, (list, tuple)):
        for n, item in enumerate(value):
            _add(groups, f"{name}_{n}", item, _assign_item(value, n), level + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            _add(groups, f"{name}_{key}", item, _assign_item(value, key), level + 1)
    else:
        for field in fields(value):
            assign = None if type(value).__dataclass_params__.frozen else partial(setattr, value, field.name)
            _add(groups, f"{name}_{field.name}", getattr(value, field.name), assign, level + 1)


def _assign_item(container: Any, key: Any) -> Callable[[Any], None] | None:
    return partial(setitem, container, key) if isinstance(container, (MutableMapping, list)) else None


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type) and kind_of(value) == "plain"


def _holds_objects(container: Any, level: int) -> bool:
    if level > _MOST_LEVELS:
        return False
    items = container.values() if isinstance(container, dict) else container
    kinds = {*map(type, items)} - _WITHOUT_STATE
    for item in items if kinds else ():
        if type(item) in _CONTAINERS:
            if _holds_objects(item, level + 1):
                return True
        elif type(item) is ByRank or kind_of(item) != "plain" or _is_record(item):
            return True
    return False


def _check_names(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise UnsupportedStateError(
            f"a state is a dict of named objects, not a value of type {type(state).__qualname__}"
        )
    for name in state:
        if not isinstance(name, str) or not is_group(name) or name == RNG:
            hint = "A letter, then letters, digits or underscores, 64 at most; rng is taken."
            raise UnsupportedStateError("this cannot be the name of a part of the state", key=repr(name), hint=hint)


def storable(state: Mapping[str, Any]) -> Groups:
    """Flatten a state, and check that a restore would find all tensors of its modules by name.

    Raises UnsupportedStateError as `flat` does, also for modules in FullyShardedDataParallel, whose parameters are
    flat, for a ZeroRedundancyOptimizer, and for modules with one of another kind (a LookupTable) that is not a group.
    """
    groups = flat(state)
    zero: Any = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    for name, value in groups.items() if zero else ():
        if isinstance(value, zero):
            raise UnsupportedStateError(
                "a ZeroRedundancyOptimizer cannot be stored: each rank has the state of other whole parameters",
                key=name,
                hint="Shard with torch.distributed.fsdp.fully_shard(model), which shards the optimizer's state too, or "
                "take the optimizer that it wraps.",
            )
    fsdp1: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    named = {id(value) for value in groups.values()}
    for name, module in groups.modules.items():
        for path, inner in module.named_modules():
            if fsdp1 and isinstance(inner, fsdp1):
                raise UnsupportedStateError(
                    "a module in FullyShardedDataParallel (FSDP1) cannot be stored: its parameters are flat",
                    key=name,
                    hint="Shard it with torch.distributed.fsdp.fully_shard(model): each parameter keeps its name.",
                )
            if (kind := kind_of(inner)) != "module" and id(inner) not in named:
                hint = f'Name it in the state: {{"{name}": model, "{kind}": model.{path}}}.'
                why = f"a {type(inner).__name__} is a group of its own"
                raise UnsupportedStateError(why, key=f"{name}/{path}", hint=hint)
    return groups
