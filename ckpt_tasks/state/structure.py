"""Remembers the structure of a state's modules and optimizers, so that the next save need not walk them.

To find the names, ties and shapes of many small tensors takes longer than to copy them. So a capture compares every
fact on which the trees depend with the last capture, and takes that one's trees if all are equal. With many ranks, and
where foreign code reads a state, each capture walks it.
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
from ckpt_tasks.state.kinds.names import Scope, unwrapped
from ckpt_tasks.state.kinds.optimizers import is_ordinary, recaptured
from ckpt_tasks.state.tensors.tensors import TensorSet, identity

_PLAIN = {torch.Tensor, nn.Parameter}


class Facts(NamedTuple):
    """The live tensors of modules and optimizers, and all that their trees, and the choice of tensors, depend on."""

    names: Sequence[str]
    tensors: list[torch.Tensor]
    facts: list[Any]


class Structure:
    """What the last capture found of the modules and optimizers of a state; between captures it holds no tensor."""

    def __init__(self, *, remembers: bool = True) -> None:
        self._remembers = remembers
        self._now: Facts | None = None
        self._facts: list[Any] | None = None
        self._groups: dict[str, GroupState] = {}
        self._places: dict[str, int] = {}  # Where each tensor that is stored is among those of the facts.
        self._known: dict[tuple[Any, ...], str] = {}
        self._frozen: frozenset[str] | None = None

    def recall(
        self, state: Mapping[str, Any], order: Sequence[str], kinds: Mapping[str, str]
    ) -> tuple[dict[str, GroupState], TensorSet] | None:
        """Return the modules and optimizers of a state, and their tensors, as they are now; None if a fact differs."""
        first = [name for name in order if kinds[name] in ("module", "optimizer")]
        now = facts_of(state, first) if self._remembers and first and order[: len(first)] == first else None
        if now is not None and now.facts == self._facts:  # No facts are remembered after a capture that failed.
            tensors, groups = TensorSet(), dict(self._groups)
            tensors.take_all({key: now.tensors[n] for key, n in self._places.items()}, self._known)
            modules = {name: state[name] for name in first if kinds[name] == "module"}
            for name in first[len(modules) :]:
                tree = recaptured(state[name], groups[name].tree, name, tensors, modules)
                groups[name] = replace(groups[name], tree=tree)
            if len(tensors.tensors) == len(self._places):
                return groups, tensors
        # Forget all of it: what is remembered is of one capture.
        self._now, self._facts, self._frozen = now, None, None
        return None

    def note(self, groups: Mapping[str, GroupState], tensors: TensorSet) -> None:
        """Remember these groups if they are the modules and optimizers that the last `recall` did not know."""
        now = self._now
        if now is None or len(groups) < len(now.names):
            return
        first: dict[Any, int] = {}
        for n, tensor in enumerate(now.tensors):
            first.setdefault(identity(tensor), n)
        # An option that is a tensor has no fact. One without memory, or with a flag, is stored by another tensor.
        sound = None not in first and not any(one.is_neg() or one.is_conj() for one in now.tensors)
        self._facts = now.facts if sound and {*map(identity, tensors.tensors.values())} <= first.keys() else None
        if self._facts is not None:
            self._groups = {name: replace(group, kept=_kept_json(group)) for name, group in groups.items()}
            self._known = dict(tensors.known)
            self._places = {key: first[identity(one)] for key, one in tensors.tensors.items()}
        self._now = None

    def frozen(self, scope: Scope, tensors: TensorSet) -> frozenset[str]:
        """Return the keys of the parameters without gradient."""
        if self._frozen is None:
            still = {name for name, parameter in scope.parameters if not parameter.requires_grad}
            self._frozen = frozenset(still.intersection(tensors.tensors))
        return self._frozen


def facts_of(state: Mapping[str, Any], names: Sequence[str]) -> Facts | None:
    """Look at modules and then optimizers; return None if the tree of one may depend on more than the facts."""
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
    return Facts(names, tensors, facts)


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
