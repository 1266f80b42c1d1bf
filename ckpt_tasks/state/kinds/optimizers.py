"""Optimizers as groups: a checkpoint has their state by the names of the parameters, not by positions.

torch numbers parameters in the order in which the optimizer got them, and restores by number: after a parameter is
reordered or frozen, moments silently attach to the wrong parameters (github.com/pytorch/pytorch issue 192202). In a
checkpoint every parameter has a name: from a module of the same state ("model/head.weight"), else from the optimizer's
`param_names`, else from its position ("#0.3": group 0, position 3). A restore never casts values to the parameter's
dtype.

The optimizer's tree also has the requires_grad flags and modes that training has switched (state/kinds/switches.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.format.tree import TensorRef
from ckpt_tasks.state.kinds.differences import Differences
from ckpt_tasks.state.kinds.group_parts import Guard
from ckpt_tasks.state.kinds.replaced import replaced_options
from ckpt_tasks.state.kinds.switches import SWITCHES, are_switches, begun_flags, restore_modes, switched, trained_groups
from ckpt_tasks.state.tensors.copies import Copies
from ckpt_tasks.state.tensors.packing import pack, unpack
from ckpt_tasks.state.tensors.placements import is_sharded
from ckpt_tasks.state.tensors.tensor_sources import HeldTensors, Maker
from ckpt_tasks.state.tensors.tensors import TensorSet

_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_NOT_OPTIONS = ("params", "param_names")
# Schedules add these options to their optimizer's param groups.
_OF_SCHEDULES = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}


def capture_optimizer(
    optimizer: Optimizer,
    group: str,
    names: Mapping[int, str],
    tensors: TensorSet,
    modules: Mapping[str, nn.Module] | None = None,
) -> dict[str, Any]:
    """Turn an optimizer's state into a tree.

    `names` maps id() of a parameter to its name; `modules` has the modules of the state by group. The tree has `state`
    (by parameter), `shared` (entries without a parameter), `param_groups` (options, and the names in `params`), `other`
    (additions of a subclass), `shapes` (of parameters outside the state's modules), and `on_cpu` (names of entries on
    the CPU whose parameters are on a device). If the loop has changed options itself, `begun` has their first values.
    If training has frozen or unfrozen parameters, or switched modes of modules, the tree also has `requires_grad` and
    `modes`. Raises UnsupportedStateError for an optimizer whose
    state_dict is not in torch's format.
    """
    state = _state_dict(optimizer, group)
    named = _named_groups(optimizer, names, group)
    numbers = _numbers(state, named)
    live = dict(pair for members in named for pair in members)
    per_name = {numbers[n]: entry for n, entry in state["state"].items() if n in numbers}
    return {
        **pack_optimizer(state, numbers, group, tensors),
        "shapes": {name: [*p.shape] for name, p in live.items() if id(p) not in names},
        "on_cpu": _on_cpu(per_name, live),
        **switched(optimizer, live, group, tensors, modules),
    }


def recaptured(
    optimizer: Optimizer, tree: Mapping[str, Any], group: str, tensors: TensorSet, modules: Mapping[str, nn.Module]
) -> dict[str, Any]:
    """Return an ordinary optimizer's tree with the options and switches of now, and what else it was before."""
    pairs = [(then["params"], now) for then, now in zip(tree["param_groups"], optimizer.param_groups, strict=True)]
    groups = [{**now, "params": names} for names, now in pairs]
    live = {name: one for names, now in pairs for name, one in zip(names, now["params"], strict=True)}
    return {
        **{name: part for name, part in tree.items() if name not in SWITCHES},
        "param_groups": _packed_options(groups, group, tensors),
        **switched(optimizer, live, group, tensors, modules),
    }


def pack_optimizer(
    state: Mapping[str, Any], names: Mapping[Any, str], group: str, tensors: TensorSet
) -> dict[str, Any]:
    """Return the part of an optimizer's tree that comes from its state_dict; `names`: parameters' names by number."""
    entries = state["state"]
    other = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {
        "state": {names[n]: pack(entry, f"{group}/{names[n]}", tensors) for n, entry in entries.items() if n in names},
        "shared": pack({n: entry for n, entry in entries.items() if n not in names}, f"{group}/shared", tensors),
        "param_groups": _packed_options(
            [{**one, "params": [names[n] for n in one["params"]]} for one in state["param_groups"]], group, tensors
        ),
        "other": pack(other, f"{group}/other", tensors),
    }


def _packed_options(groups: Iterable[Mapping[str, Any]], group: str, tensors: TensorSet) -> list[dict[str, Any]]:
    return [
        {"params": options["params"], "options": pack(_options(options), f"{group}/param_groups/{n}", tensors)}
        for n, options in enumerate(groups)
    ]


class OptimizerPart:
    """Restores one optimizer, in its own order of parameters; parameters in `kept` keep their current state."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: str,
        tree: Any,
        names: Mapping[int, str],
        copies: Copies,
        *,
        modules: Mapping[str, nn.Module] | None = None,
        kept: frozenset[str] = frozenset(),
    ):
        self._optimizer = optimizer
        self._modules = modules or {}
        self._group = group
        self._tree = _checked(tree, group)
        self._named = _named_groups(optimizer, names, group)
        self._copies = copies
        self._kept = kept
        self._make = Maker(HeldTensors({}))
        self._state: dict[Any, Any] = {}
        self._options: list[dict[str, Any]] = []
        self._value: dict[str, Any] = {}
        self.guard = None if is_ordinary(optimizer) else Guard(optimizer, group, optimizer.state_dict())

    def compare(self, differences: Differences) -> None:
        """Compare the parameters, their param groups, and the shapes of parameters outside the state's modules."""
        here = {name: (n, p) for n, members in enumerate(self._named) for name, p in members if name not in self._kept}
        there = {name: n for n, saved in enumerate(self._tree["param_groups"]) for name in saved["params"]}
        differences.names(self._group, set(here), set(there))
        if len(self._named) != len(self._tree["param_groups"]):
            count = len(self._tree["param_groups"])
            differences.differ(self._group, f"{len(self._named)} param groups here, {count} in the checkpoint")
            differences.hint = "Make the same param groups before the restore; add_param_group() others after it."
        saved = {option for group in self._tree["param_groups"] for option in group["options"]} - _OF_SCHEDULES
        own = {option for group in self._optimizer.param_groups for option in group}
        lost, lacking = (sorted(map(str, one)) for one in (saved - own, self._optimizer.defaults.keys() - saved))
        if lost and lacking:  # If only one side lacks options, the versions of torch differ.
            lists = f"one with {', '.join(lacking)} here, with {', '.join(lost)} in the checkpoint"
            differences.differ(self._group, f"another kind of optimizer: {lists}")
        if not any(self._optimizer.state.values()):  # Do not index the state: that creates entries.
            options = [group["options"] for group in self._tree["param_groups"]]
            replaced_options(self._group, self._optimizer, options, differences, self._tree.get("begun", []))
        for name, (n, parameter) in here.items():
            if there.get(name, n) != n:
                differences.differ(f"{self._group}/{name}", f"in param group {n} here, {there[name]} in the checkpoint")
            shape = self._tree["shapes"].get(name)
            if shape is not None and shape != [*parameter.shape]:
                differences.differ(f"{self._group}/{name}", f"{[*parameter.shape]} here, {shape} in the checkpoint")

    def prepare(self, make: Maker) -> None:
        """Make every new value; request copies into existing tensors of the same shape and dtype."""
        self._make = make
        if self.guard is not None:
            self._value = self._numbered()
            return
        live = cast("Mapping[Any, Any]", self._optimizer.state)
        self._state = unpack(self._tree["shared"], self._make, {k: v for k, v in live.items() if type(k) is str})
        groups = zip(self._tree["param_groups"], self._named, self._optimizer.param_groups, strict=True)
        for n, (saved, members, live_options) in enumerate(groups):
            options = saved["options"]
            for name, parameter in members:
                if name in self._tree["state"]:
                    at = partial(device_of_entry, parameter=parameter, options=options, on_cpu=self._tree["on_cpu"])
                    place, entry = f"{self._group}/{name}", self._tree["state"][name]
                    self._state[parameter] = self._values(place, entry, live.get(parameter, {}), at, parameter)
                elif name in self._kept and parameter in live:
                    self._state[parameter] = live[parameter]
            device = members[0][1].device if members and options.get("capturable") else torch.device("cpu")
            at = partial(_anywhere, device=device)
            made = self._values(f"{self._group}/param_groups/{n}", options, live_options, at)
            self._options.append({**self._optimizer.defaults, **made})

    def write(self) -> None:
        """Set the optimizer's state. Keep the dicts of the param groups: schedulers and CUDA graphs refer to them."""
        saved, begun = self._tree.get("requires_grad", {}), begun_flags(self._optimizer)
        taken = {name: p for members in self._named for name, p in members if name not in self._kept}
        restore_modes(self._modules, trained_groups(taken, self._modules), self._tree.get("modes", {}))
        for name, parameter in taken.items():
            takes = saved.get(name, begun.get(id(parameter), parameter.requires_grad))
            if parameter.requires_grad != takes:
                parameter.requires_grad_(takes)
        if self.guard is not None:
            self._optimizer.load_state_dict(self._value)
            return
        state = cast("dict[Any, Any]", self._optimizer.state)
        state.clear()
        state.update(self._state)
        for live, made in zip(self._optimizer.param_groups, self._options, strict=True):
            kept = {key: live[key] for key in _NOT_OPTIONS if key in live}
            live.clear()
            live.update({**made, **kept})

    def _values(
        self,
        place: str,
        saved: Mapping[str, Any],
        live: Mapping[str, Any],
        at: Callable[[str], torch.device],
        parameter: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        made = {}
        for key, value in saved.items():
            old: Any = live.get(key)
            home = self._home(old, value, at(key)) if type(value) is TensorRef else None
            if home is not None and home is old:
                self._copies.want(f"{place}/{key}", old, value)
            made[key] = home
            if home is None:
                made[key] = unpack(value, partial(self._make, device=at(key), model=parameter), old)
        return made

    def _home(self, old: Any, ref: TensorRef, device: torch.device) -> Any:
        """Return the tensor that receives a stored one: one that shared its memory when saved, else the current one."""
        home = self._copies.shared(ref, device)
        if home is None and (type(old) is torch.Tensor or is_sharded(old)) and not old.requires_grad:
            like = self._make.source.like(ref.key)
            if old.shape == like.shape and old.dtype == like.dtype and self._copies.bind(old, ref.key):
                return old
        return home

    def _numbered(self) -> dict[str, Any]:
        # Build the state in the form of torch's own state_dict, with this optimizer's parameter numbers.
        make = self._make
        own = self._optimizer.state_dict()
        numbers = {name: n for n, name in _numbers(own, self._named).items()}
        state = unpack(self._tree["shared"], make)
        for name, entry in self._tree["state"].items():
            state[numbers[name]] = unpack(entry, make, own["state"].get(numbers[name]))
        state |= {numbers[name]: own["state"][numbers[name]] for name in self._kept if numbers[name] in own["state"]}
        groups = []
        for saved, live in zip(self._tree["param_groups"], own["param_groups"], strict=True):
            kept = {key: live[key] for key in _NOT_OPTIONS if key in live}
            groups.append({**unpack(saved["options"], make, live), **kept})
        return {**unpack(self._tree["other"], make, own), "state": state, "param_groups": groups}


def optimizer_names(optimizer: Optimizer, names: Mapping[int, str], group: str) -> list[list[str]]:
    """Return the names of an optimizer's parameters by param group; `names`: the modules' parameter names by id()."""
    return [[name for name, _ in members] for members in _named_groups(optimizer, names, group)]


def parameters_in(tree: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters in an optimizer's tree, in the order of their param groups."""
    return [name for members in tree["param_groups"] for name in members["params"]]


def as_state_dict(tree: Mapping[str, Any], renamed: Callable[[str], Any]) -> dict[str, Any]:
    """Return an optimizer's tree in the form of torch's state_dict; `renamed` gives a parameter's name or number."""
    state = {renamed(name): entry for name, entry in tree["state"].items()} | dict(tree["shared"])
    groups = [
        {**members["options"], "params": [renamed(name) for name in members["params"]]}
        for members in tree["param_groups"]
    ]
    return {"state": state, "param_groups": groups, **tree["other"]}


def numbered(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's tree in the form of torch's state_dict, with parameters by number."""
    numbers = {name: n for n, name in enumerate(parameters_in(tree))}
    return as_state_dict(tree, numbers.__getitem__)


def _state_dict(optimizer: Optimizer, group: str) -> dict[str, Any]:
    state = optimizer.state_dict()
    try:
        sizes = [len(members["params"]) for members in state["param_groups"]]
        sound = sizes == [len(members["params"]) for members in optimizer.param_groups]
        sound = sound and all(isinstance(entry, dict) for key, entry in state["state"].items() if type(key) is int)
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        hint = "Wrap it in an object of another type with state_dict and load_state_dict."
        raise UnsupportedStateError(
            "an optimizer whose state_dict is not torch's cannot be stored", key=group, hint=hint
        )
    return state


def _named_groups(optimizer: Optimizer, names: Mapping[int, str], group: str) -> list[list[tuple[str, torch.Tensor]]]:
    named: list[list[tuple[str, torch.Tensor]]] = []
    taken: dict[str, int] = {}
    for n, options in enumerate(optimizer.param_groups):
        own = options.get("param_names")
        members = [
            (names.get(id(p)) or (own[position] if own else f"#{n}.{position}"), p)
            for position, p in enumerate(options["params"])
        ]
        for name, parameter in members:
            if taken.setdefault(name, id(parameter)) != id(parameter):
                raise UnsupportedStateError("two parameters of the optimizer have one name", key=f"{group}/{name}")
        named.append(members)
    return named


def _numbers(state: Mapping[str, Any], named: list[list[tuple[str, torch.Tensor]]]) -> dict[Any, str]:
    return {
        number: name
        for options, members in zip(state["param_groups"], named, strict=True)
        for number, (name, _) in zip(options["params"], members, strict=True)
    }


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in _NOT_OPTIONS}


def _on_cpu(per_name: Mapping[str, Any], live: Mapping[str, torch.Tensor]) -> list[str] | None:
    if all(parameter.is_cpu for parameter in live.values()):
        return None
    return sorted(
        {
            key
            for name, entry in per_name.items()
            for key, value in entry.items()
            if isinstance(value, torch.Tensor) and value.is_cpu and not live[name].is_cpu
        }
    )


def device_of_entry(
    key: str, *, parameter: torch.Tensor, options: Mapping[str, Any], on_cpu: list[str] | None
) -> torch.device:
    """Return the device of a new state entry: as when saved, or torch's choice if all parameters were on the CPU then.

    torch's choice is the parameter's device, but the CPU for a `step` that no kernel reads.
    """
    if on_cpu is None:
        aside = key == "step" and not (options.get("fused") or options.get("capturable"))
    else:
        aside = key in on_cpu
    return torch.device("cpu") if aside else parameter.device


def _anywhere(_key: str, *, device: torch.device) -> torch.device:
    return device


def is_ordinary(optimizer: Optimizer) -> bool:
    """Return True if an optimizer saves and loads its state by torch's base class, without hooks."""
    kind = type(optimizer)
    own = kind.state_dict is Optimizer.state_dict and kind.load_state_dict is Optimizer.load_state_dict
    return own and not any(getattr(optimizer, name, None) for name in _HOOKS)


def _checked(tree: Any, group: str) -> dict[str, Any]:
    try:
        groups = [(list(saved["params"]), dict(saved["options"])) for saved in tree["param_groups"]]
        parts = [dict(tree[name]) for name in ("state", "shared", "other", "shapes")]
        entries = [dict(entry) for entry in parts[0].values()]
        known = {name for members, _ in groups for name in members}
        sound = len(groups) > 0 and len(entries) <= len(known) and known >= parts[0].keys() and "on_cpu" in tree
        sound = sound and all(isinstance(one, Mapping) for one in tree.get("begun", []))
        sound = sound and are_switches(tree.get("requires_grad", {}), tree.get("modes", {}))
    except (KeyError, TypeError, ValueError, AttributeError):
        sound = False
    if not sound:
        raise IntegrityError("the optimizer's tree is malformed", key=group)
    return cast("dict[str, Any]", tree)
