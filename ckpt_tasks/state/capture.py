"""Capture a state: everything that a resumed training needs, as trees of plain values and live tensors.

A *state* is a dict; each key names a *group*. A value is a module, an optimizer, a random generator, anything with
state_dict and load_state_dict, or a plain value: tensors, arrays, numbers, strings and containers of them. Nothing is
copied here except containers: a caller that needs the tensors as they are now copies them before training continues.

What a value is among many ranks is decided here alone, by the kind of its group (`_RULES`); `ByRank` overrides it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from ckpt_tasks.errors import CkptError
from ckpt_tasks.format.kinds import RNG
from ckpt_tasks.objects.generators import capture_generator, capture_streams
from ckpt_tasks.objects.kinds import kind_of, may_draw
from ckpt_tasks.objects.modules import capture_module
from ckpt_tasks.objects.names import named_parameters, parameter_names
from ckpt_tasks.objects.optimizers import capture_optimizer
from ckpt_tasks.objects.parts import Captured, GroupState
from ckpt_tasks.objects.plain import refuse_copies_of_state
from ckpt_tasks.process.gc_pause import gc_paused
from ckpt_tasks.state.groups import by_rank_of, flat, modules_of
from ckpt_tasks.tensors.placements import ALONE, World, reshard
from ckpt_tasks.tensors.streams import current_streams, preserved_rng
from ckpt_tasks.tensors.tensors import Rule, TensorSet
from ckpt_tasks.tensors.values import pack

__all__ = ["capture"]

# Memory that two groups share belongs to the first of these kinds, so that a module is restored from its own files.
# A data loader may draw from a generator in its state_dict(), so generators come after it.
_ORDER = ("module", "optimizer", "stateful", "generator", "plain")

# A module has its own rule for what is not a parameter.
_RULES = {
    "module": Rule.REPLICATED,
    "optimizer": Rule.REPLICATED,
    "stateful": Rule.ONE,
    "generator": Rule.BY_RANK,
    "plain": Rule.ONE,
    "rng": Rule.BY_RANK,
}


def capture(state: Mapping[str, Any], *, rng: bool = True, world: World = ALONE) -> Captured:
    """Capture a state and, with `rng`, the random streams of the process.

    Draws no random number and changes nothing. A user's own state_dict() may draw: the streams that it moved are put
    back, and only those, because other threads may draw meanwhile. Tensors with the same memory, dtype, shape and
    strides are stored once, also across groups. In a `world` of many ranks the tensors are those that this rank
    writes. Raises UnsupportedStateError with the path ("group/name/…") of a value that cannot be stored.
    """
    state = flat(state)
    own = by_rank_of(state)
    reshard(modules_of(state).values())
    tensors = TensorSet(world)
    captured: dict[str, GroupState] = {}
    streams = current_streams() if rng else {}
    with gc_paused():
        modules = modules_of(state)
        parameters = named_parameters(modules)
        names = parameter_names(parameters)
        named = {name for name, _ in parameters} if world.size > 1 else ()
        for name in sorted(state, key=lambda name: _ORDER.index(kind_of(state[name]))):
            by_torch = not may_draw(state[name])
            rule = Rule.BY_RANK if name in own else _RULES[kind_of(state[name])]
            try:
                with nullcontext() if by_torch else preserved_rng(), tensors.by(rule):
                    captured[name] = _capture_group(
                        state[name], name, names, named, tensors, modules=modules, by_torch=by_torch
                    )
            except Exception as error:
                if not isinstance(error, CkptError):  # the object's own, which goes on as it is
                    error.add_note(f"It was raised while {name} was read for a checkpoint; nothing of it was written.")
                raise
    groups = {name: captured[name] for name in state}
    if rng:
        with tensors.by(_RULES[RNG]):
            groups[RNG] = GroupState(RNG, capture_streams(streams, tensors))
    for name, group in groups.items() if world.size > 1 else ():
        buffers = tuple(key.removeprefix(f"{name}/") for key in tensors.buffers if key.startswith(f"{name}/"))
        groups[name] = replace(group, by_rank=name in own or _RULES[group.kind] is Rule.BY_RANK, buffers=buffers)
    still = {name for name, parameter in parameters if not parameter.requires_grad}
    frozen = frozenset(still.intersection(tensors.tensors))
    return Captured(groups, tensors.tensors, frozen, tensors.places, tensors.replicated, tensors.one_for_all)


def _capture_group(
    value: Any,
    name: str,
    names: Mapping[int, str],
    named: Collection[str],
    tensors: TensorSet,
    *,
    modules: Mapping[str, nn.Module],
    by_torch: bool,
) -> GroupState:
    kind = kind_of(value)
    if kind == "module":
        return GroupState(kind, capture_module(value, name, named, tensors, is_plain=by_torch))
    if kind == "optimizer":
        return GroupState(kind, capture_optimizer(value, name, names, tensors, modules))
    if kind == "generator":
        return GroupState(kind, capture_generator(value, name, tensors))
    if kind == "stateful":
        return GroupState(kind, pack(value.state_dict(), name, tensors))
    packed = pack(value, name, tensors)
    refuse_copies_of_state(value, name)
    return GroupState(kind, packed)
