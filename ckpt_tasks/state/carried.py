"""Gradients that an optimizer accumulates over a save, for a step after it: a module's state has none.

Only the step shows that the gradients at a save were in use, and not left behind by an earlier step. It is certain if
they are new since the optimizer's step before the save, and if the next step takes the same tensor with more in it:
`zero_grad()` would have removed it.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer

from ckpt_tasks.state.groups import Groups, objects_of
from ckpt_tasks.state.kinds.modules import Gradients
from ckpt_tasks.state.kinds.optimizers import is_ordinary

_log = logging.getLogger("ckpt_tasks")
_LOST = (
    "The gradients of %s were accumulated over a save at step %d, and are not in the state: a resume from there loses "
    "them. Save them too: state={..., 'gradients': Gradients(model)}, from ckpt_tasks"
)


def watch_gradients(state: Groups, step: int | None = None) -> None:
    """Follow the gradients of the state's optimizers; `step`: the step of a save of this state."""
    for name, optimizer in state.items():
        if isinstance(optimizer, Optimizer) and is_ordinary(optimizer):
            if optimizer not in _watched:
                _watched[optimizer] = _Carried()
                optimizer.register_step_pre_hook(_watched[optimizer].before_step)
                optimizer.register_step_post_hook(_watched[optimizer].after_step)
            if step is not None:
                _watched[optimizer].note_save(name, optimizer, step, state)


class _Carried:
    """The first gradient of an optimizer, at its last step and at the first save after that step."""

    def __init__(self) -> None:
        self._stepped: ReferenceType[torch.Tensor] | None = None  # None: unknown.
        self._at_save: tuple[ReferenceType[torch.Tensor], int, str, int] | None = None
        self._has_warned = False

    def note_save(self, name: str, optimizer: Optimizer, step: int, state: Groups) -> None:
        gradient = _first(optimizer)
        if gradient is None or self._stepped is None or self._stepped() is gradient:
            return
        if self._at_save is None and not _has(state, gradient):
            self._at_save = (ref(gradient), gradient._version, name, step)

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._at_save is None or self._has_warned:
            return
        gradient, (at_save, version, *where) = _first(optimizer), self._at_save
        self._at_save = None
        if gradient is not None and gradient is at_save() and gradient._version > version:
            self._has_warned = True
            _log.warning(_LOST, *where)

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            gradient = _first(optimizer)
            self._stepped = None if gradient is None else ref(gradient)


def _first(optimizer: Optimizer) -> torch.Tensor | None:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return next((p.grad for p in parameters if p.grad is not None), None)


def _has(state: Groups, gradient: torch.Tensor) -> bool:
    values = [*objects_of(state)]
    values += [one for value in values if isinstance(value, Gradients) for one in value.state_dict().values()]
    return any(value is gradient for value in values)


_watched: WeakKeyDictionary[Optimizer, _Carried] = WeakKeyDictionary()
