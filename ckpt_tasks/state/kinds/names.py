"""Names of modules' tensors and parameters, without the parts that wrappers add."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.state.tensors.tensors import identity

EXTRA = "_extra_state"
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_COMPILED = re.compile(r"(^|\.)_orig_mod(?=\.)")


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers DistributedDataParallel, DataParallel and torch.compile."""
    inner: nn.Module | None = module
    while inner is not None:
        module = inner
        modules = dict(module._modules.items())  # The mapping of a ScriptModule has no get().
        inner = module.module if isinstance(module, _WRAPPERS) else modules.get("_orig_mod")
    return module


def named_parameters(modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """List every parameter with its full key "group/name", once for each name that it has."""
    return [
        (f"{group}/{bare_name(name)}", parameter)
        for group, module in modules.items()
        for name, parameter in unwrapped(module).named_parameters(remove_duplicate=False)
    ]


def parameter_names(named: Iterable[tuple[str, nn.Parameter]]) -> dict[int, str]:
    """Return each parameter's name by id(); of several names, the first in alphabetical order."""
    names: dict[int, str] = {}
    for name, parameter in named:
        first = names.setdefault(id(parameter), name)
        if name < first:
            names[id(parameter)] = name
    return names


def tied_names(state: Mapping[str, Any], stored: Collection[str]) -> dict[str, str]:
    """Map each name in a module's state that is not stored to a stored name of a tensor with the same memory.

    A safetensors file stores tied weights once, under one of their names.
    """
    tensors = {n: live for n, live in state.items() if isinstance(live, torch.Tensor) and not n.endswith(EXTRA)}
    missing = {name: known for name in tensors if name not in stored and (known := identity(tensors[name]))}
    homes = {identity(tensors[name]): name for name in stored if name in tensors} if missing else {}
    return {name: homes[known] for name, known in missing.items() if known in homes}


def bare_name(name: str) -> str:
    """Return a tensor's name without the parts that torch.compile adds."""
    return _COMPILED.sub("", name).lstrip(".") if "_orig_mod." in name else name


def module_state(module: nn.Module, group: str, *, live: bool = False) -> dict[str, Any]:
    """Return a module's state by names without wrappers. `live`: with its own parameters, not detached ones.

    Raises UnsupportedStateError if two names become equal without wrappers, or if a module cannot save its state.
    """
    try:
        state = unwrapped(module).state_dict(keep_vars=True) if live else unwrapped(module).state_dict()
    except NotImplementedError as error:  # bitsandbytes' embeddings raise it.
        hint = "Put only the modules that train into the state, and make this one from its source again."
        raise UnsupportedStateError(f"a module cannot be saved: {error}", key=group, hint=hint) from error
    if not any("_orig_mod." in name for name in state):
        return dict(state)
    named = {bare_name(name): value for name, value in state.items()}
    if len(named) != len(state):
        raise UnsupportedStateError("two entries of the state_dict have one name without the wrappers", key=group)
    return named


class Scope:
    """The surroundings of a group: the flat state, its modules, and the names of all parameters.

    `home` is the identity of the committed checkpoint that a save follows, or that a restore reads.
    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        modules: Mapping[str, nn.Module],
        can_assign: Callable[[str], bool],
        home: str | None = None,
    ):
        self.home = home
        self.state = state
        self.modules = modules
        self.can_assign = can_assign

    @cached_property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter with its full key, once for each name that it has."""
        return named_parameters(self.modules)

    @cached_property
    def names(self) -> dict[int, str]:
        """Each parameter's name by id()."""
        return parameter_names(self.parameters)

    @cached_property
    def full_keys(self) -> frozenset[str]:
        """The full keys of all parameters; a parameter with several names has several keys."""
        return frozenset(name for name, _ in self.parameters)
