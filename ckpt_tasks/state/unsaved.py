"""What a save leaves out without an error: the program hears of it, once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from ckpt_tasks.state.capture import may_draw
from ckpt_tasks.state.flat import flat
from ckpt_tasks.state.gradients import Gradients
from ckpt_tasks.state.kinds import kind_of
from ckpt_tasks.state.rng import undisturbed

__all__ = ["warn_of_unsaved"]

_log = logging.getLogger("ckpt_tasks")
_warned: WeakSet[DataLoader[Any]] = WeakSet()
_empty: set[tuple[str, type]] = set()  # by name: an object may have no hash, and no weak reference
_MAY_BE_EMPTY = (torch.amp.GradScaler, Gradients)  # one that is off; before the first gradient


def warn_of_unsaved(state: Mapping[str, Any]) -> None:
    """Warn of a DataLoader that shuffles by itself, and of every object whose `state_dict()` is empty.

    A loader is looked for where training is: in the variables of the functions that are running, and in the attributes
    of the objects and the items of the lists that these hold.
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
        with undisturbed() if may_draw(value) else nullcontext():
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
    loaders: dict[int, DataLoader[Any]] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("ckpt_tasks.checkpoint"):
            for value in frame.f_locals.values():
                for one in (value, *_inside(value)):
                    # torchdata's loader has samplers of its own.
                    if isinstance(one, DataLoader) and isinstance(vars(one).get("sampler"), RandomSampler):
                        loaders[id(one)] = one
        frame = frame.f_back
    return [*loaders.values()]


def _inside(value: Any) -> Iterable[Any]:
    if type(value) in (list, tuple):
        return tuple(value)
    return tuple(vars(value).values()) if type(type(value)) is type and hasattr(value, "__dict__") else ()


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
