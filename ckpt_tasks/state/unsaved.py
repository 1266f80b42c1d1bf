"""Warn of objects that a state leaves out: checked at the first save of a process, one warning each.

The garbage collector lists loaders, optimizers and schedules, in a variable of a training loop or an attribute of a
program. An object of another kind may hold some of them, so if the state has one, there is no warning of optimizers and
schedules.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, RandomSampler

from ckpt_tasks.state.groups import flat, kind_of, modules_of
from ckpt_tasks.state.modules import Gradients, named_parameters
from ckpt_tasks.state.restoring import may_draw
from ckpt_tasks.state.rng import preserved_rng

__all__ = ["warn_of_trained", "warn_of_unsaved"]

_log = logging.getLogger("ckpt_tasks")
_warned: WeakSet[Any] = WeakSet()
_empty: set[tuple[str, type]] = set()  # by name: an object may have no hash, and no weak reference
_MAY_BE_EMPTY = (torch.amp.GradScaler, Gradients)  # a scaler that is off; gradients before the first backward


def warn_of_unsaved(state: Mapping[str, Any]) -> None:
    """Warn of what a resume would lose: shuffling loaders, optimizers, schedules, and objects with an empty state.

    Only optimizers of the state's modules count, and schedules of the state's optimizers.
    """
    state = flat(state)
    alive = _alive(DataLoader, Optimizer, LRScheduler)
    if _new(value for value in alive if isinstance(value, DataLoader) and _shuffles(value)):
        _log.warning(
            "A DataLoader with shuffle=True keeps no position: after a resume in the middle of an epoch it goes on "
            "with other batches. Use ResumableSampler, or a StatefulDataLoader in the state"
        )
    if not any(map(_may_hold_others, state.values())):
        _warn_of_optimizers(state, [value for value in alive if isinstance(value, Optimizer)])
        _warn_of_schedules(state, [value for value in alive if isinstance(value, LRScheduler)])
        _warn_of_ranks(state)
    _warn_of_empty(state)


def warn_of_trained(state: Mapping[str, Any]) -> None:
    """Warn that a run begins with a state that has been trained: in a notebook, a loop that began before."""
    optimizers = [(name, value) for name, value in flat(state).items() if isinstance(value, Optimizer)]
    if trained := [name for name, value in optimizers if any(map(_has_stepped, value.state.values()))]:
        _log.warning(
            "The run has no checkpoint and begins at step 0 with the state as it is, and %s has taken steps. If a loop "
            "ran before, make model and optimizer anew. After a save(0, state), restore() can go back to step 0",
            ", ".join(trained),
        )


def _has_stepped(of_parameter: object) -> bool:
    """Say whether an optimizer's state of a parameter is one of training.

    Adagrad makes one with step 0 at once, and a look at one that is not there yet (schedulefree's) an empty one.
    """
    if of_parameter == {}:
        return False
    step = of_parameter.get("step") if isinstance(of_parameter, Mapping) else None
    return not isinstance(step, int | float | torch.Tensor) or bool(torch.as_tensor(step).any())


def _warn_of_optimizers(state: Mapping[str, Any], optimizers: list[Optimizer]) -> None:
    """Warn of optimizers that train the state's parameters but are not in the state."""
    of_module = {id(parameter): name.partition("/")[0] for name, parameter in named_parameters(modules_of(state))}
    for value in state.values():
        if isinstance(value, Optimizer):
            of_module = {number: name for number, name in of_module.items() if number not in _parameters(value)}
    for value in _new(value for value in optimizers if not _parameters(value).isdisjoint(of_module)):
        module = next(name for number, name in of_module.items() if number in _parameters(value))
        _log.warning(
            "The %s of %s is not in the state: after a resume it begins anew, without its moments. "
            "Save it too: state={..., 'optimizer': optimizer}",
            type(value).__qualname__,
            module,
        )


def _warn_of_schedules(state: Mapping[str, Any], schedules: list[LRScheduler]) -> None:
    """Warn of schedules of the state's optimizers that are not in the state."""
    of = {id(value): name for name, value in state.items() if isinstance(value, Optimizer)}
    for value in state.values():
        if isinstance(value, LRScheduler):
            of.pop(id(value.optimizer), None)
    missing = _new(value for value in schedules if id(getattr(value, "optimizer", None)) in of)
    if missing:
        _log.warning(
            "The %s of %s is not in the state: after a resume the schedule begins anew. "
            "Save it too: state={..., 'schedule': schedule}",
            ", ".join(dict.fromkeys(type(value).__qualname__ for value in missing)),
            of[id(missing[0].optimizer)],
        )


def _warn_of_ranks(state: Mapping[str, Any]) -> None:
    """Warn of an AdaLoRA model of PEFT: the averages by which it takes ranks away are outside its state."""
    for name, module in modules_of(state).items():
        if _new(one for one in module.modules() if type(one).__module__ == "peft.tuners.adalora.model"):
            _log.warning(
                "The rank allocator of %s is not in the state: after a resume AdaLoRA takes other ranks away. Save it "
                "too: state={..., 'ranks': AdaLoraRanks(model)}, from ckpt_tasks.integrations.huggingface",
                name,
            )


def _warn_of_empty(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        with preserved_rng() if may_draw(value) else nullcontext():
            nothing = (name, type(value)) not in _empty and _saves_nothing(value)
        if nothing:
            _empty.add((name, type(value)))
            _log.warning(
                "Nothing of %s is saved: the state_dict() of this %s is empty. If it counts something, make its state "
                "persistent, or give it a state_dict()",
                name,
                type(value).__qualname__,
            )


def _new(objects: Iterable[Any]) -> list[Any]:
    """Return the objects that no warning has named yet, and remember them."""
    new = [value for value in objects if value not in _warned]
    _warned.update(new)
    return new


def _alive(*classes: type) -> list[Any]:
    """Return every live object of these classes and of their subclasses."""
    # Every object refers to its class. frame.f_locals would instead keep the loop's variables alive: the batch and
    # the graph of this step.
    kinds: set[type] = set()
    new = [*classes]
    while new:
        kinds.add(kind := new.pop())
        new += set(type.__subclasses__(kind)) - kinds
    return [value for value in gc.get_referrers(*kinds) if type(value) in kinds]


def _shuffles(loader: DataLoader[Any]) -> bool:
    # torchdata's loader has its own samplers.
    return isinstance(vars(loader).get("sampler"), RandomSampler)


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _may_hold_others(value: Any) -> bool:
    """Say whether a value is a user's or a framework's object: it may hold an optimizer's state."""
    return kind_of(value) == "stateful" and not type(value).__module__.startswith(("torch", "ckpt_tasks.state."))


def _saves_nothing(value: Any) -> bool:
    kind = kind_of(value)
    if kind == "module":
        return any(map(_has_attributes, value.modules())) and not value.state_dict()
    if kind != "stateful" or isinstance(value, _MAY_BE_EMPTY):
        return False
    state = value.state_dict()
    return isinstance(state, Mapping) and not state


def _has_attributes(module: nn.Module) -> bool:
    """Say whether a module has tensors that are neither parameters nor buffers, as metrics do, also in lists."""
    held = [value for name, value in vars(module).items() if not name.startswith("_")]
    held += [item for value in held if isinstance(value, list) for item in value]
    return any(isinstance(value, torch.Tensor) for value in held)
