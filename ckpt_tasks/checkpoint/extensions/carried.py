"""Gradients that an optimizer accumulates over a save, for a step after it: a module's state has none.

A hook of one parameter counts what each backward adds to its gradient. A gradient is carried over a save if the next
backward adds to the same tensor, unchanged in between, and the optimizer steps before anything else has changed it:
`zero_grad()` would have removed it, or set it to zeros. A step before the save does not: a loss with parameters of its
own under Trainer, which zeroes the gradients of its model, is an example. A loop that has done so once does so again:
its later saves are told at once, since no step may follow them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ckpt_tasks.checkpoint.extension import Extension, Metrics, Restored
from ckpt_tasks.state.groups import Groups, objects_of
from ckpt_tasks.state.kinds.kinds import Covering, may_hold_others
from ckpt_tasks.state.kinds.modules import Gradients
from ckpt_tasks.state.kinds.names import named_parameters
from ckpt_tasks.state.kinds.optimizers import is_ordinary

_log = logging.getLogger("ckpt_tasks")
_LOST = (
    "The gradients of %s were accumulated over a save at step %d, and are not in the state: a resume from there loses "
    "them. Save them too: state={..., 'gradients': Gradients(model)}, from ckpt_tasks"
)


class CarriedGradients(Extension):
    """Warns of gradients that a save leaves out: at the save, or at the optimizer's step that uses them."""

    step = 0  # The loop's last completed step.

    def restored(self, now: Restored) -> None:
        """Follow the gradients of a loop that begins or resumes."""
        self.step = now.step
        for optimizer in now.state.values():
            self._follow(optimizer, anew=True)

    def stepped(self, step: int, state: Mapping[str, Any], metrics: Metrics) -> None:
        """Remember where the loop is."""
        self.step = step

    def captured(self, step: int, state: Groups) -> None:
        """Look for gradients that the save of this state leaves out; a foreign object may save them."""
        if any(map(may_hold_others, state.values())):
            return
        for name, optimizer in state.items():
            if (carried := self._follow(optimizer)) is not None:
                carried.note_save(name, optimizer, step, state)

    def _follow(self, optimizer: Any, *, anew: bool = False) -> _Carried | None:
        if not isinstance(optimizer, Optimizer) or not is_ordinary(optimizer):
            return None
        is_new = optimizer not in _watched
        if is_new:
            _watched[optimizer] = _Carried()
            optimizer.register_step_post_hook(_watched[optimizer].note_step)
        if is_new or anew:
            _watched[optimizer].begin(optimizer, self)
        return _watched[optimizer]


class _Carried:
    """The gradient of one parameter of an optimizer, from its first backward to the optimizer's step."""

    def __init__(self) -> None:
        self._parameter: ReferenceType[torch.Tensor] | None = None
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._gradient: tuple[ReferenceType[torch.Tensor], int] | None = None  # With its version, after a backward.
        self._weights = 0  # The version at the last backward: a compiled step changes it, and calls no hook.
        self._is_taken = False  # Whether a step has taken the gradient, and no backward has added to it since.
        self._at_step = 0  # The loop's last completed step, at the last backward.
        self._crosses = self._has_crossed = False  # Whether this gradient, and any, was carried over a loop's step.
        self._at_save: tuple[str, int] | None = None
        self._has_warned = False

    def begin(self, optimizer: Optimizer, position: CarriedGradients) -> None:
        self._position = position
        self._gradient, self._at_save, self._crosses = None, None, False
        if self._parameter is None or self._parameter() is None:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            self._follow(next((p for p in parameters if p.requires_grad and p.is_leaf and not is_lazy(p)), None))

    def _follow(self, parameter: torch.Tensor | None) -> None:
        if self._hook is not None:
            self._hook.remove()
        if parameter is not None:
            self._parameter = ref(parameter)
            self._hook = parameter.register_post_accumulate_grad_hook(self.note_backward)  # type: ignore[no-untyped-call]

    def _follow_other(self, optimizer: Optimizer, state: Groups) -> None:
        """Follow another parameter of the state that has a gradient: the loop does not train the first one."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if others := [p for p in parameters if p.grad is not None and p.is_leaf]:
            held = {id(p) for _, p in named_parameters(state.modules)} | {*map(id, objects_of(state))}
            if (other := next((p for p in others if id(p) in held), None)) is not None:
                self._follow(other)

    def note_backward(self, parameter: torch.Tensor) -> None:
        """Record that a backward has added to the gradient; `AccumulateGrad` changes a kept tensor once."""
        gradient = parameter.grad
        if torch.compiler.is_compiling() or gradient is None:
            return
        if self._gradient is not None and self._weights != parameter._version:
            if self._is_taken:  # No step has changed the weights: the program has, as SAM does.
                self._at_save = None
            self._end()
        if self._gradient is None or self._gradient[0]() is not gradient or gradient._version != self._gradient[1] + 1:
            self._crosses, self._at_save = False, None
        elif self._position.step != self._at_step:
            self._crosses = True
        self._gradient = (ref(gradient), gradient._version)
        self._weights, self._at_step, self._is_taken = parameter._version, self._position.step, False

    def note_step(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        parameter = None if self._parameter is None else self._parameter()
        gradient = None if parameter is None else parameter.grad
        if self._gradient is not None and (gradient is None or not self._is_of_backward(gradient)):
            self._at_save, self._crosses = None, False  # Without a backward, the program has reset it or made another.
        self._end()
        if parameter is not None and gradient is not None:  # A loop that does not zero it goes on adding to it.
            self._gradient, self._weights = (ref(gradient), gradient._version), parameter._version
            self._is_taken = True

    def _is_of_backward(self, gradient: torch.Tensor) -> bool:
        """Return True if a gradient is the one of the last backward, changed only on its way to its first step."""
        of_backward, version = self._gradient or (lambda: None, 0)
        return of_backward() is gradient and not (self._is_taken and version != gradient._version)

    def _end(self) -> None:
        """A step of the optimizer has taken the gradient."""
        if self._at_save is not None:
            self._warn(*self._at_save)
        self._has_crossed |= self._crosses
        self._gradient, self._at_save, self._crosses = None, None, False

    def note_save(self, name: str, optimizer: Optimizer, step: int, state: Groups) -> None:
        parameter = None if self._parameter is None else self._parameter()
        gradient = None if parameter is None else parameter.grad
        if parameter is None or gradient is None:
            self._follow_other(optimizer, state)
            return
        of_backward, version = self._gradient or (lambda: None, 0)
        is_new = of_backward() is gradient and (version, self._weights) == (gradient._version, parameter._version)
        if not is_new or _has(state, gradient):
            return
        if self._has_crossed:
            self._warn(name, step)
        elif self._at_save is None:
            self._at_save = (name, step)

    def _warn(self, name: str, step: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(_LOST, name, step)


def _has(state: Groups, gradient: torch.Tensor) -> bool:
    values = [*objects_of(state)]
    values += [one for value in values if isinstance(value, Covering) for one in value.covered()]
    values += [one for value in values if isinstance(value, Gradients) for one in value.state_dict().values()]
    return any(value is gradient for value in values)


_watched: WeakKeyDictionary[Optimizer, _Carried] = WeakKeyDictionary()
