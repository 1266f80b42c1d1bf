"""The structure of a state's modules and optimizers: where it is as at the last capture, only values are read anew.

Most of the time that training waits for a save of many small tensors would go into finding the same names, ties and
shapes again. What a tree depends on is compared instead, one fact after the other, and the tree taken as it is. With
many ranks, and where foreign code reads a state, each capture walks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt_tasks.state.kinds.group_parts import GroupState, KeptJson
from ckpt_tasks.state.kinds.modules import runs_torchs_code
from ckpt_tasks.state.kinds.names import unwrapped
from ckpt_tasks.state.kinds.optimizers import is_ordinary, recaptured
from ckpt_tasks.state.tensors.tensors import TensorSet, identity

_PLAIN = {torch.Tensor, nn.Parameter}


class Look(NamedTuple):
    """The live tensors of modules and optimizers, and all that their trees, and the choice of tensors, depend on."""

    tensors: list[torch.Tensor]
    facts: list[Any]


class Structure:
    """What the last capture found of the modules and optimizers of a state; it holds no tensor."""

    def __init__(self) -> None:
        self._facts: list[Any] | None = None
        self._groups: dict[str, GroupState] = {}
        self._places: dict[str, int] = {}  # Of the tensors that are stored, among those of the look.
        self._known: dict[tuple[Any, ...], str] = {}
        self._frozen: frozenset[str] = frozenset()

    def keep(self, look: Look, groups: Mapping[str, GroupState], tensors: TensorSet, frozen: frozenset[str]) -> None:
        """Remember the groups and the tensors that a capture of what was looked at has found."""
        first: dict[Any, int] = {}
        for n, tensor in enumerate(look.tensors):
            first.setdefault(identity(tensor), n)
        # An option that is a tensor is not among those looked at. One without memory, or with a flag, is no live one.
        clear = None not in first and not any(one.is_neg() or one.is_conj() for one in look.tensors)
        self._facts = look.facts if clear and {*map(identity, tensors.tensors.values())} <= first.keys() else None
        if self._facts is not None:
            self._groups = {name: replace(group, kept=_kept_json(group)) for name, group in groups.items()}
            self._known, self._frozen = dict(tensors.known), frozen
            self._places = {key: first[identity(one)] for key, one in tensors.tensors.items()}

    def recall(
        self, look: Look, state: Mapping[str, Any]
    ) -> tuple[dict[str, GroupState], TensorSet, frozenset[str]] | None:
        """Return the groups, their tensors and the keys of frozen ones as they are now; None if a fact differs."""
        if self._facts is None or self._facts != look.facts:
            return None
        tensors, groups = TensorSet(), {}
        tensors.take_all({key: look.tensors[n] for key, n in self._places.items()}, self._known)
        for name, group in self._groups.items():
            value = state[name]
            if isinstance(value, Optimizer):
                modules = {name: one for name, one in state.items() if isinstance(one, nn.Module)}
                group = replace(group, tree=recaptured(value, group.tree, name, tensors, modules))  # noqa: PLW2901
            groups[name] = group
        return None if len(tensors.tensors) > len(self._places) else (groups, tensors, self._frozen)


def look_at(state: Mapping[str, Any], names: Sequence[str]) -> Look | None:
    """Look at modules and then optimizers; None if the tree of one may depend on more than the facts."""
    tensors: list[torch.Tensor] = []
    facts: list[Any] = [*names]
    for name in names:
        see = _see_module if isinstance(state[name], nn.Module) else _see_optimizer
        if not see(state[name], tensors, facts):
            return None
    if not {*map(type, tensors)} <= _PLAIN or {one.layout for one in tensors} - {torch.strided}:
        return None
    facts += [
        (t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad, type(t), t.is_neg(), t.is_conj()) for t in tensors
    ]
    return Look(tensors, facts)


def _see_module(module: nn.Module, tensors: list[torch.Tensor], facts: list[Any]) -> bool:
    modules = [unwrapped(module)]
    for one in modules:
        if not runs_torchs_code(one):
            return False
        parameters, kept, inner = one._parameters, one._buffers, one._modules
        if kept:
            kept = {name: value for name, value in kept.items() if name not in one._non_persistent_buffers_set}
        here = [*parameters.values(), *kept.values(), *inner.values()]
        # None in the place of a parameter, a buffer or a module has a name, and is not in the state.
        facts.append((*parameters, 0, *kept, 1, *inner, *[n for n, value in enumerate(here) if value is None]))
        tensors += [value for part in (parameters, kept) for value in part.values() if value is not None]
        modules += [value for value in inner.values() if value is not None]
    return True


def _see_optimizer(optimizer: Optimizer, tensors: list[torch.Tensor], facts: list[Any]) -> bool:
    if not is_ordinary(optimizer) or "state_dict" in vars(optimizer):
        return False
    begin, place = len(tensors), {id(one): n for n, one in enumerate(tensors)}
    places = [[place.get(id(one)) for one in options["params"]] for options in optimizer.param_groups]
    if any(None in some for some in places):
        return False  # It trains parameters outside the modules.
    facts.append(places)
    for parameter, entry in optimizer.state.items():
        if id(parameter) not in place or type(entry) is not dict:
            return False
        facts.append((place[id(parameter)], *entry))
        tensors += entry.values()
    return {*map(type, tensors[begin:])} <= {torch.Tensor}


def _kept_json(group: GroupState) -> KeptJson | None:
    """Return a place for the JSON of what stays the same in a tree of this group, if all its names allow it."""
    names = ["state"] if group.kind == "optimizer" else [*group.tree]
    return None if any(name.startswith("~") for name in names) else KeptJson(names)
