"""Warnings of objects that a state leaves out, at the first save after a step, once for each object.

The garbage collector lists loaders, optimizers and schedules. We search for scalers, generators, averages and tables
only in the variables of the loop that saves, since others in the process may belong to other code; a trainer's loop is
the code that calls the trainer. If the state has an object of an unknown class, which may hold such objects, only
loaders that draw numbers cause a warning. A scaler or generator causes a warning only if it has changed by the next
save: a generator that only made or split the data is not part of training. An optimizer that was alive at the start
causes one only at the first save after it has stepped: it may belong to another phase of the program.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Subset
from torch.utils.data import sampler as samplers
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ckpt_tasks.checkpoint.extension import Extension, Restored
from ckpt_tasks.format.tree import SCALARS
from ckpt_tasks.state.data.foreign_samplers import DRAWING, deals_out, draws, is_whole
from ckpt_tasks.state.data.loader import stood_in_for
from ckpt_tasks.state.groups import Groups, held_in, objects_of
from ckpt_tasks.state.kinds.kinds import KINDS, Covering, kind_of, may_draw, may_hold_others
from ckpt_tasks.state.kinds.modules import Gradients
from ckpt_tasks.state.kinds.names import named_parameters
from ckpt_tasks.state.kinds.optimizers import is_ordinary
from ckpt_tasks.state.kinds.started import Started
from ckpt_tasks.state.tensors.random_streams import preserved_rng, same_state, stream_state

_log = logging.getLogger("ckpt_tasks")
_warned: WeakSet[Any] = WeakSet()
_lookers: WeakSet[UnsavedObjects] = WeakSet()
_stepped: WeakSet[Optimizer] = WeakSet()  # Since the last start.
_empty: set[tuple[str, type]] = set()  # Names with types: an object may allow neither hash nor weak reference.
# These may have an empty state: a disabled scaler, and gradients before the first backward.
_MAY_BE_EMPTY = (torch.amp.GradScaler, Gradients)
# random.Random is not in this tuple: libraries draw delays from such objects.
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState)
_FEATURES = {kind.has: name for name, kind in KINDS.items() if kind.moving and isinstance(kind.has, type)}
_KINDS = (torch.amp.GradScaler, AveragedModel, *_FEATURES, *_GENERATORS)
_ANY_NUMBER = ("generator", *_FEATURES.values())
# The loop that saves is above the frames of these modules.
_NOT_LOOPS = (
    *("ckpt_tasks.checkpoint.", "ckpt_tasks.state.data.", "ckpt_tasks.integrations.", "ckpt_tasks.state."),
    *("contextlib", "tqdm."),
    *("accelerate.", "lightning.", "pytorch_lightning.", "torch.", "transformers.", "trl."),
)
_NAMES = ("params", "param_names")  # What a param group has beside its options.
_NOT_HELD = "%s (%s) is not in the state: after a resume it begins anew. Save it too: state={..., '%s': %s}"


class UnsavedObjects(Extension):
    """Warns of the objects that a resume of one Checkpointer would lose."""

    _has_looked = False
    _restored_step = 0
    _held: Sequence[Any] = ()  # The state's objects of _KINDS.
    _watched: Sequence[tuple[str, Any, Any]] = ()
    _outside: Mapping[Optimizer, str] = WeakKeyDictionary()

    def __post_init__(self) -> None:
        """Note which optimizers step, in the whole process."""
        _note_steps()

    def restored(self, now: Restored) -> None:
        """Note from a start on which optimizers step: one outside the state may belong to another phase of training."""
        if now.begins:
            _warn_of_trained(now.state)
        self._restored_step = now.step
        _stepped.clear()

    def captured(self, step: int, state: Groups) -> None:
        """Warn of objects outside the state at the first save after a step; of scalers and generators at the next save.

        Considers only optimizers of the state's modules, and schedules of the state's optimizers.
        """
        self._look_again()
        if self._has_looked or step <= self._restored_step:
            return
        self._has_looked = True
        _lookers.add(self)
        kinds: tuple[Any, ...] = (DataLoader, Optimizer, LRScheduler, _BaseDataLoaderIter)
        covered = [one for value in state.values() if isinstance(value, Covering) for one in value.covered()]
        saved = {*map(id, covered)}
        alive = [one for one in _alive(*kinds) if id(one) not in saved]
        loaders, optimizers, schedules, iterators = ([one for one in alive if isinstance(one, kind)] for kind in kinds)
        parts = [*objects_of(state), *covered, *(one for module in state.modules.values() for one in module.modules())]
        self._held = [part for part in parts if isinstance(part, _KINDS)]
        alone = not any(map(may_hold_others, state.values()))
        by_trainer = any(map(_is_trainer, state.values()))
        _warn_of_drawing(loaders, nested=alone and not by_trainer)
        if alone:
            outside = _outside(state, optimizers)
            _warn_of_optimizers(outside)
            self._outside = WeakKeyDictionary(outside)
            _warn_of_schedules(state, schedules)
            _warn_of_ranks(state, saved)
            _warn_of_parameters(state)
            if not by_trainer:  # A trainer has its own position in the data.
                _warn_of_begun_again(iterators, step, self._restored_step)
            with suppress(Exception):  # A foreign object in a variable must not make a save fail.
                self._watched = [*_in_variables(state, parts, loaders)]
        _warn_of_empty(state)

    def _look_again(self) -> None:
        """Warn of what has moved, or stepped, since the save before."""
        watched, self._watched = self._watched, ()
        for name, value, before in watched:
            now = _moving(value)
            # If the seed has changed, the program seeds the generator itself, and need not save it.
            moved = now[0] is None or (not same_state(before[0], now[0]) and before[1] == now[1])
            if moved and not any(value is one for u in _lookers for one in u._held):
                _log.warning(_NOT_HELD, name, type(value).__qualname__, _word(value), name)
        _warn_of_optimizers(self._outside)


def _is_trainer(value: Any) -> bool:
    return isinstance(value, Covering) and isinstance(value, Started)


def _in_variables(state: Groups, parts: list[Any], loaders: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, object and changing state of objects in the loop's variables that the state lacks.

    Yields scalers and averages only if the state has none; averages only of the state's modules.
    """
    known = {*map(id, parts)}
    for holder in (*parts, *loaders):  # Look only at a module's own attributes: there are many modules.
        level = 2 if isinstance(holder, nn.Module) else 0
        known |= {id(one) for _, one in held_in(holder, _GENERATORS, level=level)}
    shapes = [[p.shape for p in module.parameters()] for module in state.modules.values()]
    for variable, value in _variables():
        for name, one in held_in(value, _KINDS, variable, lambda one: id(one) in known or kind_of(one) != "plain"):
            word = _word(one)
            is_new = id(one) not in known and (word in _ANY_NUMBER or all(word != _word(part) for part in parts))
            known.add(id(one))
            if is_new and (not isinstance(one, AveragedModel) or [p.shape for p in one.parameters()] in shapes):
                yield name, one, _moving(one)


def _variables() -> Iterator[tuple[str, Any]]:
    """Yield the variables of the loop that saves: of the calling file and of its functions on the stack."""
    frame = inspect.currentframe()
    while frame and str(frame.f_globals.get("__name__")).startswith(_NOT_LOOPS):
        frame = frame.f_back
    file = frame.f_code.co_filename if frame else ""
    yield from [*frame.f_globals.items()] if frame else []
    while frame and frame.f_code.co_filename == file:
        yield from [*frame.f_locals.items()]
        if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            frame.f_locals.clear()  # This copy would keep the batch and the graph of this step alive.
        frame = frame.f_back


def _word(value: Any) -> str:
    """Return a group name to suggest for a value in a warning."""
    words = {torch.amp.GradScaler: "scaler", AveragedModel: "averaged", **_FEATURES}
    return next((word for kind, word in words.items() if isinstance(value, kind)), "generator")


def _moving(value: Any) -> tuple[Any, Any]:
    """Return the state that training changes (None for an average, which may start late), and a generator's seed."""
    if isinstance(value, (torch.amp.GradScaler, AveragedModel)):
        return (None if isinstance(value, AveragedModel) else value.state_dict()), None
    if moving := KINDS[kind_of(value)].moving:
        return moving(value), None
    return stream_state(value), value.initial_seed() if isinstance(value, torch.Generator) else None


def _warn_of_trained(state: Groups) -> None:
    """Warn if a run begins with a trained state, for example in a notebook whose loop has run before."""
    optimizers = [(name, value) for name, value in state.items() if isinstance(value, Optimizer)]
    if trained := [name for name, value in optimizers if any(map(_has_stepped, value.state.values()))]:
        _log.warning(
            "The run has no checkpoint and begins at step 0 with the state as it is, and %s has taken steps. If a loop "
            "ran before, make model and optimizer anew. After a save(0, state), restore() can go back to step 0",
            ", ".join(trained),
        )


def _has_stepped(of_parameter: object) -> bool:
    """Return True if the optimizer's state of a parameter shows a step of training.

    Adagrad creates a state with step 0 at once; with schedulefree, reading a missing state creates an empty state.
    """
    if of_parameter == {}:
        return False
    step = of_parameter.get("step") if isinstance(of_parameter, Mapping) else None
    return not isinstance(step, int | float | torch.Tensor) or bool(torch.as_tensor(step).any())


@cache
def _note_steps() -> None:
    # Looking for the optimizers that are there at a start would take 50 ms.
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        _stepped.add(optimizer)


def _outside(state: Groups, optimizers: Iterable[Optimizer]) -> dict[Optimizer, str]:
    """Return the optimizers outside the state that train its parameters, each with the name of a module."""
    of_module = {id(parameter): name.partition("/")[0] for name, parameter in named_parameters(state.modules)}
    for number in (n for value in state.values() if isinstance(value, Optimizer) for n in _parameters(value)):
        of_module.pop(number, None)
    trained = ((value, next(filter(None, map(of_module.get, _parameters(value))), None)) for value in optimizers)
    return {value: module for value, module in trained if module is not None}


def _warn_of_optimizers(outside: Mapping[Optimizer, str]) -> None:
    """Warn of optimizers outside the state that have stepped since the start and hold what a new one would not."""
    stepped = (value for value in outside if (value in _stepped and _holds_something(value)) or not is_ordinary(value))
    for value in _new(stepped):
        _log.warning(
            "The %s of %s is not in the state: after a resume it begins anew, without its moments. "
            "Save it too: state={..., 'optimizer': optimizer}",
            type(value).__qualname__,
            outside[value],
        )


def _holds_something(optimizer: Optimizer) -> bool:
    """Return False for an optimizer like SGD without momentum, whose options are those that it was made with."""
    given = optimizer.defaults
    options = [one for group in optimizer.param_groups for one in group.items() if one[0] not in _NAMES]
    return bool(optimizer.state) or any(not _is_as_given(value, given.get(name)) for name, value in options)


def _is_as_given(value: Any, given: Any) -> bool:
    """Return False for what a program could change in place, and compare only numbers and texts."""
    plain = type(value) in SCALARS and type(given) in SCALARS
    return value == given if plain else value is given and type(value) is tuple


def _warn_of_parameters(state: Groups) -> None:
    """Warn of optimizers in the state whose parameters are outside the state."""
    held = {id(p) for _, p in named_parameters(state.modules)} | {*map(id, objects_of(state))}
    for name, value in state.items():
        if isinstance(value, Optimizer) and is_ordinary(value):
            trained = [p for group in value.param_groups for p in group["params"] if p.requires_grad]
            missing = [[*p.shape] for p in trained if id(p) not in held]
            if missing and _new([value]):
                _log.warning(
                    "%s trains %d parameters that are not in the state (shapes %s): after a resume they begin anew, "
                    "with the moments of the old ones. Put their module into the state, or the parameters themselves",
                    name,
                    len(missing),
                    ", ".join(map(str, missing[:3])) + (", …" if missing[3:] else ""),
                )


def _warn_of_begun_again(iterators: list[Any], step: int, restored_step: int) -> None:
    """Warn of a plain loader that begins an epoch again after a restore in the middle of that epoch."""
    for value in iterators:
        batches = value._index_sampler
        in_order = type(batches) is samplers.BatchSampler and is_whole(batches.sampler, value._dataset)
        # A Subset may be the rest of the epoch; torchdata's iterators keep a position.
        if not in_order or isinstance(value._dataset, Subset) or not type(value).__module__.startswith("torch."):
            continue
        if value._num_yielded == (step - restored_step) % len(batches) != 0 != restored_step % len(batches):
            _log.warning(
                "A DataLoader keeps no position: after the restore of step %d, in the middle of an epoch, the loop "
                "has begun that epoch again, and samples come twice (no matter for an evaluation). Use "
                "ResumableLoader, and put it into the state",
                restored_step,
            )


def _warn_of_schedules(state: Groups, schedules: list[LRScheduler]) -> None:
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


def _warn_of_ranks(state: Groups, covered: set[int]) -> None:
    """Warn of PEFT's AdaLoRA models: their state lacks the averages that reduce the ranks of matrices."""
    for name, module in state.modules.items():
        adaptive = (one for one in module.modules() if type(one).__module__ == "peft.tuners.adalora.model")
        if _new(one for one in adaptive if id(one) not in covered):
            _log.warning(
                "The rank allocator of %s is not in the state: after a resume AdaLoRA takes other ranks away. Save it "
                "too: state={..., 'ranks': AdaLoraRanks(model)}, from ckpt_tasks.integrations.huggingface",
                name,
            )


def _warn_of_empty(state: Groups) -> None:
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
    """Return the objects that have caused no warning so far, and remember them."""
    _warned.update(new := [value for value in objects if value not in _warned])
    return new


def _alive(*classes: type) -> list[Any]:
    """Return every live object of these classes and of their subclasses."""
    # Every object refers to its class, so list the referrers of the classes. A search through frame.f_locals would keep
    # the loop's variables alive: the batch and the graph of this step.
    kinds: set[type] = set()
    new = [*classes]
    while new:
        kinds.add(kind := new.pop())
        new += set(type.__subclasses__(kind)) - kinds
    return [value for value in gc.get_referrers(*kinds) if type(value) in kinds]


def _warn_of_drawing(loaders: list[Any], *, nested: bool) -> None:
    """Warn of loaders whose samplers draw numbers; if `nested`, look also inside batch samplers."""
    drawing: dict[Any, Any] = {}
    for loader in loaders:
        own = vars(loader).get("sampler")  # torchdata's loader has its own samplers.
        of_batches = vars(loader).get("batch_sampler")
        inner = [own, getattr(own, "sampler", None)]
        inner += [of_batches, getattr(of_batches, "sampler", None)] if nested else []
        for one in inner:
            if isinstance(one, DRAWING) or deals_out(one, shuffled=True) or (nested and draws(one)):
                drawing[loader] = one
    if new := _new(one for one in drawing if one not in stood_in_for):
        one = drawing[new[0]]
        _log.warning(
            "A DataLoader with %s keeps no position: after a resume in the middle of an epoch it continues "
            "with other batches. Use ResumableLoader, ResumableSampler, or a StatefulDataLoader in the state",
            "shuffle=True" if isinstance(one, samplers.RandomSampler) else type(one).__name__,
        )


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _saves_nothing(value: Any) -> bool:
    kind = kind_of(value)
    if kind == "module":
        return any(map(_has_attributes, value.modules())) and not value.state_dict()
    if kind != "stateful" or isinstance(value, _MAY_BE_EMPTY):
        return False
    state = value.state_dict()
    return isinstance(state, Mapping) and not state


def _has_attributes(module: nn.Module) -> bool:
    """Return True if a module has tensors that are not parameters or buffers, also in lists, as metrics have."""
    held = [value for name, value in vars(module).items() if not name.startswith("_")]
    held += [item for value in held if isinstance(value, list) for item in value]
    return any(isinstance(value, torch.Tensor) for value in held)
