"""Modules as groups: captured by the names of their state_dict, restored by copies into their parameters and buffers.

Names omit wrappers (DistributedDataParallel, DataParallel, torch.compile), so an unwrapped module can be restored from
the checkpoint of a wrapped module. As in a state_dict, non-persistent buffers, modes (train, eval) and requires_grad
flags are not part of the state; the group of an optimizer holds the modes and flags that training has switched.
load_state_dict takes time quadratic in the number of submodules, so a restore calls it only if the module has code for
it (hooks, extra state, an overridden method), and then under a guard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from ckpt_tasks.checked import checked
from ckpt_tasks.errors import StateMismatchError, UnsupportedStateError
from ckpt_tasks.format.tree import TensorRef, Typed
from ckpt_tasks.state.kinds.differences import Differences
from ckpt_tasks.state.kinds.group_parts import Guard
from ckpt_tasks.state.kinds.names import EXTRA, bare_name, module_state, tied_names, unwrapped
from ckpt_tasks.state.tensors.copies import Copies
from ckpt_tasks.state.tensors.packing import pack, unpack
from ckpt_tasks.state.tensors.placements import cut_like
from ckpt_tasks.state.tensors.tensor_sources import Maker, Stored
from ckpt_tasks.state.tensors.tensors import DTYPES, RankRule, TensorSet, difference, identity, refuse

_OF_FOUR_BITS = ".quant_state.bitsandbytes__"
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


def capture_module(
    module: nn.Module, group: str, parameters: Collection[str], tensors: TensorSet, *, is_plain: bool = False
) -> dict[str, Any]:
    """Turn a module's state into a tree: name → TensorRef, or the result of get_extra_state.

    `parameters` has the full keys of all parameters, if there are many ranks. `is_plain`: only torch's own code reads
    the state, so take live tensors: detaching a DTensor takes longer than the rest of this function. Raises
    UnsupportedStateError for a weight that a restore could not load.
    """
    # With many ranks, buffers may differ: each rank has running statistics of its own batches.
    live = unwrapped(module).named_buffers(remove_duplicate=False) if tensors.many else ()
    buffers = {bare_name(name) for name, _ in live}
    tree = {}
    for name, value in module_state(module, group, live=is_plain).items():
        key = f"{group}/{name}"
        if _OF_FOUR_BITS in name:
            what = "a weight of four bits, which bitsandbytes saves and does not load again, cannot be stored"
            hint = "Name its base: state={**without_base(model, 'org/name@revision'), ...}."
            raise UnsupportedStateError(what, key=key, hint=hint)
        is_tensor = isinstance(value, torch.Tensor) and not name.endswith(EXTRA)
        try:
            if is_tensor and (not tensors.many or key in parameters):
                tree[name] = tensors.add(value, key, exact=False)
                continue
            with tensors.by(RankRule.BUFFER if is_tensor and name in buffers else RankRule.ONE):
                tree[name] = tensors.add(value, key, exact=False) if is_tensor else pack(value, key, tensors)
        except UnsupportedStateError:
            if not is_tensor or value.layout is torch.strided:
                raise
            with tensors.by(RankRule.BUFFER if name in buffers else RankRule.ONE):
                tree[name] = pack(value, key, tensors)  # Store a sparse tensor as indices and values.
    return tree


class ModulePart:
    """Restores one module; the names in `kept` keep their values."""

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
        _return_scales(self._module)
        # Only load_state_dict can restore a sparse tensor.
        taking_part = any(map(_is_sparse, self._tree.values())) or any(map(takes_part, self._module.modules()))
        self.guard = Guard(self._module, group, self._module.state_dict()) if taking_part else None

    def compare(self, differences: Differences) -> None:
        """Compare a module's names, shapes, dtypes and ties with the checkpoint's."""
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
            if name not in self._tree or name.endswith(EXTRA):
                continue
            if _is_sparse(ref):
                here, there = _words(live), f"{ref.head[0]} {[*ref.head[1]]}"
                if here == there and live.layout is not torch.sparse_coo:  # torch copies only equal numbers of values.
                    count = differences.stored[ref.parts["values"].key][1][0]
                    here, there = f"{here}, {live.values().shape[0]} values", f"{there}, {count} values"
                if here != there:
                    differences.differ(f"{self._group}/{name}", f"{here} here, {there} in the checkpoint")
            elif isinstance(live, torch.Tensor):
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
        """Request the copies; if the module has its own code, build a whole state for load_state_dict instead."""
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
        if hasattr(own, "_metadata"):  # torch keeps version numbers of the submodules here.
            self._value._metadata = own._metadata  # type: ignore[attr-defined]

    def write(self) -> None:
        """Call load_state_dict if the module's own code runs; raise StateMismatchError if it ignores a shape."""
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
        """Return True if only the shape differs, and the submodule's own code may change the shape, as in QAT."""
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
            # Only parameters must stay tied: buffers lose their ties when a module moves to a device.
            if known and first.setdefault(key, known) != known and known in parameters:
                differences.differ(f"{self._group}/{name}", "tied in the checkpoint, a parameter of its own here")


def _return_scales(module: nn.Module) -> None:
    """Move the scales of bitsandbytes' Linear8bitLt back to the weights.

    The first forward pass moves an 8-bit weight's scales to the layer's own state, and the next one will do so again; a
    restore needs them at the weight.
    """
    for part in module.modules():
        if hasattr(part, "init_8bit_state"):
            weight, own = cast(Any, part.weight), cast(Any, part.state)
            if not own.has_fp16_weights and weight.SCB is None and own.SCB is not None:
                weight.CB, weight.SCB = own.CB, own.SCB


def _words(live: Any) -> str:
    return f"{live.layout} {[*live.shape]}" if isinstance(live, torch.Tensor) else "another value"


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.layout is other.layout is torch.strided


def _is_sparse(value: Any) -> TypeGuard[Typed]:
    return type(value) is Typed and value.tag == "~sparse"


class Materialized:
    """The lazy parameters and buffers of modules that a restore has given the shapes of a checkpoint."""

    def __init__(self) -> None:
        self._done: list[Any] = []

    def add(self, module: nn.Module, tree: Mapping[str, Any], stored: Stored, kept: Collection[str]) -> None:
        """Materialize the tensors of a module that the tree has; they have no values yet."""
        inner = unwrapped(module)
        for name, live in (*inner.named_parameters(), *inner.named_buffers()):
            ref = tree.get(bare_name(name)) if is_lazy(live) and bare_name(name) not in kept else None
            if type(ref) is TensorRef:
                cast(Any, live).materialize(stored[ref.key][1])
                self._done.append(live)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Make the tensors lazy again if the block raises: the restore has failed."""
        try:
            yield
        except BaseException:
            for live in self._done:
                is_parameter = isinstance(live, nn.Parameter)
                live.data = live.data.new_empty(0)
                live.__class__ = UninitializedParameter if is_parameter else UninitializedBuffer
            raise


def takes_part(module: nn.Module) -> bool:
    """Return True if reading or loading a module's state runs its own code (a hook, an overridden method)."""
    for name in _HOOKS:
        hooks = getattr(module, name, None)
        if hooks and not all(map(_is_torchs, hooks.values())):
            return True
    kind: Any = type(module)
    return _overrides(kind)


def runs_torchs_code(module: nn.Module) -> bool:
    """Return True if nothing but the code of torch.nn reads a module's state: no hook and no other method."""
    attributes = module.__dict__
    kind: Any = type(module)
    own = any(attributes.get(name) for name in _HOOKS) or any(name in attributes for name in _METHODS)
    return not own and not _overrides(kind)


def _is_torchs(hook: Any) -> bool:
    """Return True for a hook of torch.distributed: FSDP's hooks shard parameters, and do not change values."""
    function = getattr(hook, "hook", hook)  # torch wraps a hook that gets the module as an argument.
    return str(getattr(getattr(function, "func", function), "__module__", "")).startswith("torch.distributed.")


@cache
def _overrides(kind: Any) -> bool:
    # torch's own overrides only convert old versions of a state.
    for name in _METHODS:
        home = getattr(getattr(kind, name), "__module__", "")
        if not home.startswith("torch.nn.modules."):
            return True
    return False


class Gradients:
    """The gradients that a module has accumulated, as an object for the state.

    A module's state has no gradients: without this object, gradients that `backward` has accumulated since the last
    optimizer step are lost with the process. A loop that saves only at optimizer steps does not need it. A loop that
    saves between optimizer steps adds it::

        state = {"model": model, "gradients": Gradients(model), "optimizer": optimizer, "micro_step": 0}

    The object holds only a reference to the module.
    """

    @checked
    def __init__(self, module: nn.Module):
        self._module = module

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the existing gradients by parameter name: the live tensors, not copies."""
        return {name: p.grad for name, p in self._parameters().items() if p.grad is not None}

    @torch.no_grad()
    @checked
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the gradient of every parameter; to None for a parameter that `state` lacks.

        An existing gradient keeps its memory and gets new values, since DistributedDataParallel may own the memory.
        Raises StateMismatchError before it sets a gradient, for an unknown name or another shape.
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
            gradient = None if gradient is None else cut_like(gradient, parameter, name)
            old = parameter.grad
            if gradient is not None and old is not None and _is_alike(old, gradient):
                old.copy_(gradient)
            else:
                parameter.grad = None if gradient is None else gradient.detach().clone().to(parameter.device)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(unwrapped(self._module).named_parameters())
