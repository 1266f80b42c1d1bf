"""Modules: captured under the names of their state_dict, restored by copying into their own parameters and buffers.

Names do not show wrappers (DistributedDataParallel, DataParallel, torch.compile), so a wrapped module's checkpoint
restores into a bare one. As in a state_dict, non-persistent buffers, modes (train, eval) and requires_grad flags are
not part of the state; optimizers keep those that training has switched.
load_state_dict takes time quadratic in the number of submodules, so it is called only if a module's own code takes part
(hooks, extra state, an overridden method), and then under a guard.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from ckpt_tasks.checked import checked
from ckpt_tasks.errors import StateMismatchError, UnsupportedStateError
from ckpt_tasks.format.tree import TensorRef
from ckpt_tasks.state.copies import Copies
from ckpt_tasks.state.restore_parts import Differences, Maker, Rollback
from ckpt_tasks.state.tensors import DTYPES, Rule, TensorSet, difference, identity, refuse
from ckpt_tasks.state.values import pack, unpack

__all__ = [
    "Gradients",
    "ModulePart",
    "bare_name",
    "capture_module",
    "module_state",
    "named_parameters",
    "parameter_names",
    "takes_part",
    "tied_names",
    "unwrapped",
]

_EXTRA = "_extra_state"
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_COMPILED = re.compile(r"(^|\.)_orig_mod(?=\.)")
_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_METHODS = (
    "state_dict",
    "load_state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
    "get_extra_state",
    "set_extra_state",
)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside of DistributedDataParallel, DataParallel and torch.compile wrappers."""
    inner: nn.Module | None = module
    while inner is not None:
        module = inner
        modules = dict(module._modules.items())  # a ScriptModule's have no get()
        inner = module.module if isinstance(module, _WRAPPERS) else modules.get("_orig_mod")
    return module


def named_parameters(modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """List every parameter under each of its names, "group/name"."""
    return [
        (f"{group}/{bare_name(name)}", parameter)
        for group, module in modules.items()
        for name, parameter in unwrapped(module).named_parameters(remove_duplicate=False)
    ]


def parameter_names(named: Iterable[tuple[str, nn.Parameter]]) -> dict[int, str]:
    """Return each parameter's name by id(): of several names, the first in alphabetical order."""
    names: dict[int, str] = {}
    for name, parameter in named:
        first = names.setdefault(id(parameter), name)
        if name < first:
            names[id(parameter)] = name
    return names


def capture_module(
    module: nn.Module, group: str, parameters: Collection[str], tensors: TensorSet, *, is_plain: bool = False
) -> dict[str, Any]:
    """Turn a module's state into a tree: name → TensorRef, or the result of get_extra_state.

    `parameters` has the full keys of all parameters, if there are many ranks. `is_plain`: only torch's own code is
    involved, so live tensors are used: detaching a DTensor takes longer than all else that is done here.
    """
    many = tensors.world is not None and tensors.world.size > 1
    # A rank's running statistics are of its own batches.
    buffers = {bare_name(name) for name, _ in unwrapped(module).named_buffers(remove_duplicate=False)} if many else ()
    tree = {}
    for name, value in module_state(module, group, live=is_plain).items():
        key = f"{group}/{name}"
        is_tensor = isinstance(value, torch.Tensor) and not name.endswith(_EXTRA)
        if is_tensor and (not many or key in parameters):
            tree[name] = tensors.add(value, key, exact=False)
            continue
        with tensors.by(Rule.BUFFER if is_tensor and name in buffers else Rule.ONE):
            tree[name] = tensors.add(value, key, exact=False) if is_tensor else pack(value, key, tensors)
    return tree


class ModulePart:
    """Restore one module; the names in `kept` keep their values."""

    def __init__(
        self,
        module: nn.Module,
        group: str,
        tree: dict[str, Any],
        copies: Copies,
        *,
        kept: frozenset[str] = frozenset(),
    ):
        self._module = unwrapped(module)
        self._group = group
        self._state = {name: value for name, value in module_state(module, group).items() if name not in kept}
        self._tree = tree | {name: tree[stored] for name, stored in tied_names(self._state, tree).items()}
        self._value: dict[str, Any] = {}
        self._copies = copies
        self._owners = {bare_name(f"{name}.").rstrip("."): one for name, one in self._module.named_modules()}
        self._resized: dict[str, tuple[str, tuple[int, ...]]] = {}
        taking_part = any(takes_part(module) for module in self._module.modules())
        self.guard = Rollback(self._module, group, self._module.state_dict()) if taking_part else None

    def compare(self, differences: Differences) -> None:
        """Compare names, shapes, dtypes and ties."""
        differences.names(self._group, set(self._state), set(self._tree))
        differences.missing_tensors.update(
            {
                f"{self._group}/{name}": (DTYPES.get(live.dtype, ""), tuple(live.shape))
                for name, live in self._state.items()
                if name not in self._tree and isinstance(live, torch.Tensor)
            }
        )
        parameters = {bare_name(name): p for name, p in self._module.named_parameters(remove_duplicate=False)}
        for name, live in self._state.items():
            ref = self._tree.get(name)
            if name not in self._tree or name.endswith(_EXTRA):
                continue
            if isinstance(live, torch.Tensor):
                refuse(live, f"{self._group}/{name}", exact=False)
                if type(ref) is TensorRef and self._resizes(name, live, differences.stored[ref.key]):
                    self._resized[name] = differences.stored[ref.key]
                else:
                    differences.tensor(f"{self._group}/{name}", live, ref)
                if self.guard is None and type(ref) is TensorRef:
                    self._copies.offer(parameters.get(name, live), ref.key)
            elif type(ref) is TensorRef:
                differences.differ(f"{self._group}/{name}", "a tensor in the checkpoint, another value here")
        self._compare_ties(differences)

    def prepare(self, make: Maker) -> None:
        """Request the copies; make a whole state for load_state_dict if the module's own code takes part."""
        if self.guard is None:
            for name, live in self._state.items():
                self._copies.want(f"{self._group}/{name}", live, self._tree[name])
            return
        own = self._module.state_dict()
        values = (
            (name, unpack(self._tree[bare_name(name)], make, live) if bare_name(name) in self._tree else live)
            for name, live in own.items()
        )
        self._value = type(own)(values)
        if hasattr(own, "_metadata"):  # version numbers of the submodules' states
            self._value._metadata = own._metadata  # type: ignore[attr-defined]

    def write(self) -> None:
        """Call load_state_dict if the module's own code takes part; raise StateMismatchError if it ignores a shape."""
        if self.guard is None:
            return
        self._module.load_state_dict(self._value)
        if self._resized:
            state = module_state(self._module, self._group)
            different = [(name, difference(state[name], *stored)) for name, stored in self._resized.items()]
            if any(why for _, why in different):
                raise StateMismatchError(
                    "the module's own load_state_dict did not take the stored shape",
                    different=tuple(f"{self._group}/{name} ({why})" for name, why in different if why),
                )

    def _resizes(self, name: str, live: torch.Tensor, stored: tuple[str, tuple[int, ...]]) -> bool:
        """Say whether only the shape differs and the owning module's own code may change it, as in QAT."""
        dtype, shape = stored
        if DTYPES.get(live.dtype) != dtype or tuple(live.shape) == tuple(shape):
            return False
        kind: Any = type(self._owners.get(name.rpartition(".")[0]))
        return issubclass(kind, nn.Module) and _overrides(kind)

    def _compare_ties(self, differences: Differences) -> None:
        refs = {name: ref.key for name, ref in self._tree.items() if type(ref) is TensorRef and name in self._state}
        if len(set(refs.values())) == len(refs):
            return
        parameters = {identity(p) for p in self._module.parameters()}
        first: dict[str, Any] = {}
        for name, key in refs.items():
            live = self._state[name]
            known = identity(live) if isinstance(live, torch.Tensor) else None
            # Buffers lose their ties when a module moves to a device, so only parameters must stay tied.
            if known and first.setdefault(key, known) != known and known in parameters:
                differences.differ(f"{self._group}/{name}", "tied in the checkpoint, a parameter of its own here")


def tied_names(state: Mapping[str, Any], stored: Collection[str]) -> dict[str, str]:
    """Map each tensor of a module's state that is not stored to a stored one that shows the same memory.

    A safetensors file has one name of tied weights: its value is that of every other name.
    """
    tensors = {n: live for n, live in state.items() if isinstance(live, torch.Tensor) and not n.endswith(_EXTRA)}
    missing = {name: known for name in tensors if name not in stored and (known := identity(tensors[name]))}
    homes = {identity(tensors[name]): name for name in stored if name in tensors} if missing else {}
    return {name: homes[known] for name, known in missing.items() if known in homes}


def bare_name(name: str) -> str:
    """Return a tensor's name without the parts that torch.compile adds."""
    return _COMPILED.sub("", name).lstrip(".") if "_orig_mod." in name else name


def module_state(module: nn.Module, group: str, *, live: bool = False) -> dict[str, Any]:
    """Return a module's state by its names without wrappers, with `live` the parameters themselves.

    Raises UnsupportedStateError if two names are the same without wrappers.
    """
    state = unwrapped(module).state_dict(keep_vars=True) if live else unwrapped(module).state_dict()
    if not any("_orig_mod." in name for name in state):
        return dict(state)
    named = {bare_name(name): value for name, value in state.items()}
    if len(named) != len(state):
        raise UnsupportedStateError("two entries of the state_dict have one name without the wrappers", key=group)
    return named


def takes_part(module: nn.Module) -> bool:
    """Say whether the module's own code runs when its state is read or loaded: a hook, or an overridden method."""
    for name in _HOOKS:
        hooks = getattr(module, name, None)
        if hooks and not all(map(_is_torchs, hooks.values())):
            return True
    kind: Any = type(module)
    return _overrides(kind)


def _is_torchs(hook: Any) -> bool:
    """Say whether a hook is torch.distributed's: FSDP's hooks shard the parameters, and change no value."""
    function = getattr(hook, "hook", hook)  # torch wraps hooks that take the module
    return str(getattr(getattr(function, "func", function), "__module__", "")).startswith("torch.distributed.")


@cache
def _overrides(kind: Any) -> bool:
    # torch's own overrides read old versions of a state; they change nothing in a complete one.
    for name in _METHODS:
        home = getattr(getattr(kind, name), "__module__", "")
        if not home.startswith("torch.nn.modules."):
            return True
    return False


class Gradients:
    """Save and restore the gradients that a module has accumulated.

    A module's state has no gradients: what `backward` has accumulated since the last optimizer step is lost with the
    process. A loop that saves at optimizer steps does not need this. One that saves between them adds it to the state::

        state = {"model": model, "gradients": Gradients(model), "optimizer": optimizer, "micro_step": 0}

    It holds no tensors of its own.
    """

    @checked
    def __init__(self, module: nn.Module):
        self._module = module

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the existing gradients by parameter name; they are live, not copies."""
        return {name: p.grad for name, p in self._parameters().items() if p.grad is not None}

    @torch.no_grad()
    @checked
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the gradient of every parameter, None where `state` has none.

        An existing gradient keeps its memory and gets new values, since DistributedDataParallel may own the memory.
        Raises StateMismatchError, before anything is set, for an unknown name or another shape.
        """
        parameters = self._parameters()
        unknown = tuple(name for name in state if name not in parameters)
        different = tuple(
            f"{name} ({[*parameters[name].shape]} here, {[*gradient.shape]} in the checkpoint)"
            for name, gradient in state.items()
            if name in parameters and parameters[name].shape != gradient.shape
        )
        if unknown or different:
            raise StateMismatchError("the gradients do not fit the module", unexpected=unknown, different=different)
        for name, parameter in parameters.items():
            gradient = state.get(name)
            if gradient is not None and parameter.grad is not None and parameter.grad.dtype == gradient.dtype:
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = None if gradient is None else gradient.detach().clone().to(parameter.device)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(unwrapped(self._module).named_parameters())
