"""What a save leaves out without an error: the program hears of it, once."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from ckpt_tasks.state.capture import may_draw
from ckpt_tasks.state.gradients import Gradients
from ckpt_tasks.state.groups import flat, kind_of
from ckpt_tasks.state.rng import preserved_rng

__all__ = ["warn_of_unsaved"]

_log = logging.getLogger("ckpt_tasks")
_warned: WeakSet[DataLoader[Any]] = WeakSet()
_empty: set[tuple[str, type]] = set()  # by name: an object may have no hash, and no weak reference
_MAY_BE_EMPTY = (torch.amp.GradScaler, Gradients)  # one that is off; before the first gradient


def warn_of_unsaved(state: Mapping[str, Any]) -> None:
    """Warn of a DataLoader that shuffles by itself, and of every object whose `state_dict()` is empty.

    The garbage collector lists the loaders: a training loop has its own in a variable, a program in an attribute.
    """
    loaders = [loader for loader in _shuffling_loaders() if loader not in _warned]
    for loader in loaders:
        _warned.add(loader)
    if loaders:
        _log.warning(
            "A DataLoader with shuffle=True keeps no position: after a resume in the middle of an epoch it goes on "
            "with other batches. Use ResumableSampler, or a StatefulDataLoader in the state"
        )
    for name, value in flat(state).items():
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


def _shuffling_loaders() -> list[DataLoader[Any]]:
    # Every object refers to its class. frame.f_locals would keep the variables of the loop alive: the batch and
    # the graph of this step.
    kinds: set[type] = set()
    new: list[type] = [DataLoader]
    while new:
        kinds.add(kind := new.pop())
        new += set(type.__subclasses__(kind)) - kinds
    loaders = [one for one in gc.get_referrers(*kinds) if type(one) in kinds]
    # torchdata's loader has samplers of its own.
    return [one for one in loaders if isinstance(vars(one).get("sampler"), RandomSampler)]


def _saves_nothing(value: Any) -> bool:
    kind = kind_of(value)
    if kind == "module":
        return any(map(_has_attributes, value.modules())) and not value.state_dict()
    if kind != "stateful" or isinstance(value, _MAY_BE_EMPTY):
        return False
    state = value.state_dict()
    return isinstance(state, Mapping) and not state


def _has_attributes(module: nn.Module) -> bool:
    """Say whether a module has tensors that are neither parameters nor buffers, as metrics do: in lists, too."""
    held = [value for name, value in vars(module).items() if not name.startswith("_")]
    held += [item for value in held if isinstance(value, list) for item in value]
    return any(isinstance(value, torch.Tensor) for value in held)
