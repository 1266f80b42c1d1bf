"""Settings that training switches: requires_grad of parameters, modes of modules, and PEFT's choice of adapters.

PEFT's choice is which adapters are active, whether they are disabled, and their scaling.

After a resume, a loop does not repeat the switches of earlier steps. So an optimizer's tree has the changes since
training began; the program makes all other settings before the restore. If a whole module is in eval(), the save
happens during an evaluation, so its modes are not saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt_tasks.state.kinds.names import bare_name, unwrapped
from ckpt_tasks.state.tensors.packing import pack
from ckpt_tasks.state.tensors.tensors import TensorSet

# Attributes of PEFT's modules: names of the active adapters, True if all are disabled, and factors by adapter.
_CHOICES = ("active_adapter", "_active_adapter", "_disable_adapters", "scaling")
# Keys: "" for the mode of the whole module, a name for a submodule in another mode, "name:attribute" for adapters.
Modes = dict[str, Any]

# By id() of each parameter: True if it required a gradient when this training began.
_begun_flags: WeakKeyDictionary[Optimizer, dict[int, bool]] = WeakKeyDictionary()
_begun_options: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()
_SCALARS = (bool, int, float, str)
SWITCHES = ("begun", "requires_grad", "modes")  # Parts of an optimizer's tree that are there if training has switched.
_begun_modes: WeakKeyDictionary[nn.Module, Modes] = WeakKeyDictionary()


def note_begun(objects: Iterable[Any], *, anew: bool) -> None:
    """Record the settings of optimizers and modules when training begins; with `anew`, replace earlier records."""
    for value in objects:
        if isinstance(value, Optimizer):
            begun_flags(value, anew=anew)
            begun_options(value, anew=anew)
        elif isinstance(value, nn.Module) and (anew or unwrapped(value) not in _begun_modes):
            _begun_modes[unwrapped(value)] = _modes(value)


def begun_options(optimizer: Optimizer, *, anew: bool = False) -> list[dict[str, Any]]:
    """Return the plain options of each param group when training began; a loop may set a learning rate by hand."""
    if anew or optimizer not in _begun_options:
        groups = optimizer.param_groups
        _begun_options[optimizer] = [{k: v for k, v in one.items() if type(v) in _SCALARS} for one in groups]
    return _begun_options[optimizer]


def begun_flags(optimizer: Optimizer, *, anew: bool = False) -> dict[int, bool]:
    """Return, by id(), whether each parameter of an optimizer required a gradient when training began."""
    if anew or optimizer not in _begun_flags:
        groups = optimizer.param_groups
        _begun_flags[optimizer] = {id(p): p.requires_grad for options in groups for p in options["params"]}
    return _begun_flags[optimizer]


def switched_modes(modules: Mapping[str, nn.Module], groups: Iterable[str]) -> dict[str, Modes]:
    """Return the modes of each module in which training has switched a submodule."""
    switched = {}
    for group in groups:
        note_begun([modules[group]], anew=False)
        modes, begun = _modes(modules[group]), _begun_modes[unwrapped(modules[group])]
        if (modes[""] or len(modes) > 1) and modes | {"": None} != begun | {"": None}:
            switched[group] = modes
    return switched


def switched(
    optimizer: Optimizer,
    live: Mapping[str, torch.Tensor],
    group: str,
    tensors: TensorSet,
    modules: Mapping[str, nn.Module] | None,
) -> dict[str, Any]:
    """Return what training has switched, the parts SWITCHES of its tree; `live`: the parameters by name."""
    begun = begun_flags(optimizer)
    modes = switched_modes(modules, trained_groups(live, modules)) if modules else {}
    changed = {
        name: p.requires_grad for name, p in live.items() if begun.get(id(p), p.requires_grad) != p.requires_grad
    }
    return {
        **({"begun": pack(moved, f"{group}/begun", tensors)} if any(moved := _moved(optimizer)) else {}),
        **({"requires_grad": changed} if changed else {}),
        **({"modes": modes} if modes else {}),
    }


def _moved(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return, for each param group, what the options had been that the loop itself has changed, such as its rate."""
    pairs = zip(begun_options(optimizer), optimizer.param_groups, strict=False)
    return [
        {key: value for key, value in begun.items() if key in now and now[key] != value}
        if "initial_lr" not in now  # A schedule has its own state.
        else {}
        for begun, now in pairs
    ]


def trained_groups(names: Iterable[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the groups of modules that these parameters belong to, by the parameters' names."""
    return sorted(modules.keys() & {name.partition("/")[0] for name in names})


def restore_modes(modules: Mapping[str, nn.Module], groups: Iterable[str], saved: Mapping[str, Modes]) -> None:
    """Set the saved modes; a module without saved modes returns to the modes it had when training began."""
    for group in groups:
        module = unwrapped(modules[group])
        now = _modes(module)
        modes = saved.get(group) or _begun_modes.get(module, now) | {"": now[""]}
        for name, one in _named(module) if modes != now else ():
            one.training = modes.get(name, modes[""]) is True
            for choice in _CHOICES:
                if (key := f"{name}:{choice}") in modes and choice in vars(one):
                    setattr(one, choice, _copied(modes[key]))


def are_switches(flags: Any, modes: Any) -> bool:
    """Return True if the switches in an optimizer's tree are well-formed."""
    plain = isinstance(flags, Mapping) and {*map(type, flags.values())} <= {bool}
    return plain and isinstance(modes, Mapping) and all(map(_are_modes, modes.values()))


def _are_modes(modes: Any) -> bool:
    if not isinstance(modes, Mapping) or type(modes.get("")) is not bool:
        return False
    return all(
        _is_choice(value) if name.endswith(tuple(f":{choice}" for choice in _CHOICES)) else type(value) is bool
        for name, value in modes.items()
    )


def _is_choice(value: Any) -> bool:
    """Return True for a value of PEFT's: other modules have attributes of these names, such as a number `scaling`."""
    if isinstance(value, dict):
        return {*map(type, value)} <= {str} and {*map(type, value.values())} <= {int, float}
    return isinstance(value, (str, bool)) or (isinstance(value, list) and {*map(type, value)} <= {str})


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list)) else value


def _modes(module: nn.Module) -> Modes:
    module = unwrapped(module)
    modes: Modes = {"": module.training}
    for name, one in _named(module):
        attributes = one.__dict__
        if one.training is not modes[""]:
            modes[name] = one.training
        if not attributes.keys().isdisjoint(_CHOICES):
            chosen = {f"{name}:{key}": attributes[key] for key in _CHOICES if key in attributes}
            modes |= {key: _copied(value) for key, value in chosen.items() if _is_choice(value)}
    return modes


def _named(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """List a module and all its submodules, faster than named_modules(): every save calls this."""
    modules = [("", module)]
    for name, one in modules:
        if inner := one._modules:
            prefix = f"{bare_name(f'{name}.').rstrip('.')}." if name else ""
            modules += [(prefix + key, value) for key, value in inner.items() if value is not None]
    return modules
