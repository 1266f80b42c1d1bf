"""Capture a state: everything that a resumed training needs, as trees of plain values and live tensors.

A *state* is a dict; each key names a *group*. A value is a module, an optimizer, a random generator, anything with
state_dict and load_state_dict, or a plain value: tensors, arrays, numbers, strings and containers of them. Nothing is
copied here except containers: a caller that needs the tensors as they are now copies them before training continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ckpt_tasks.errors import CkptError
from ckpt_tasks.format.gc_pause import gc_paused
from ckpt_tasks.state.groups import flat, kind_of, modules_of
from ckpt_tasks.state.modules import capture_module, named_parameters, parameter_names
from ckpt_tasks.state.optimizers import capture_optimizer
from ckpt_tasks.state.placements import ALONE, World, reshard
from ckpt_tasks.state.plain import refuse_copies_of_state
from ckpt_tasks.state.restore_parts import Captured, GroupState
from ckpt_tasks.state.restoring import may_draw
from ckpt_tasks.state.rng import RNG, capture_generator, capture_streams, current_streams, preserved_rng
from ckpt_tasks.state.tensors import TensorSet
from ckpt_tasks.state.values import pack

__all__ = ["capture"]

# Memory that two groups share belongs to the first of these kinds, so that a module is restored from its own files.
# A data loader may draw from a generator in its state_dict(), so generators come after it.
_ORDER = ("module", "optimizer", "stateful", "generator", "plain")


def capture(state: Mapping[str, Any], *, rng: bool = True, world: World = ALONE) -> Captured:
    """Capture a state and, with `rng`, the random streams of the process.

    Draws no random number and changes nothing. A user's own state_dict() may draw: the streams that it moved are put
    back, and only those, because other threads may draw meanwhile. Tensors with the same memory, dtype, shape and
    strides are stored once, also across groups. In a `world` of many ranks the tensors are those that this rank
    writes. Raises UnsupportedStateError with the path ("group/name/…") of a value that cannot be stored.
    """
    state = flat(state)
    reshard(modules_of(state).values())
    tensors = TensorSet(world)
    captured: dict[str, GroupState] = {}
    streams = current_streams() if rng else {}
    with gc_paused():
        parameters = named_parameters(modules_of(state))
        names = parameter_names(parameters)
        for name in sorted(state, key=lambda name: _ORDER.index(kind_of(state[name]))):
            by_torch = not may_draw(state[name])
            try:
                with nullcontext() if by_torch else preserved_rng():
                    captured[name] = _capture_group(state[name], name, names, tensors, by_torch=by_torch)
            except Exception as error:
                if not isinstance(error, CkptError):  # the object's own, which goes on as it is
                    error.add_note(f"It was raised while {name} was read for a checkpoint; nothing of it was written.")
                raise
    groups = {name: captured[name] for name in state}
    if rng:
        with tensors.of_rank():
            groups[RNG] = GroupState("rng", capture_streams(streams, tensors))
    still = {name for name, parameter in parameters if not parameter.requires_grad}
    frozen = frozenset(still.intersection(tensors.tensors))
    return Captured(groups, tensors.tensors, frozen, tensors.places, _alike(tensors, groups, parameters))


def _alike(
    tensors: TensorSet, groups: Mapping[str, GroupState], parameters: Sequence[tuple[str, Any]]
) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
    """Return the replicated tensors that training keeps alike in all ranks.

    Buffers are not among them: each rank's running statistics are of its own batches.
    """
    if not tensors.replicated:
        return {}
    named = {name for name, _ in parameters}
    optimizers = tuple(f"{name}/" for name, group in groups.items() if group.kind == "optimizer")
    return {key: held for key, held in tensors.replicated.items() if key in named or key.startswith(optimizers)}


def _capture_group(
    value: Any, name: str, names: Mapping[int, str], tensors: TensorSet, *, by_torch: bool
) -> GroupState:
    kind = kind_of(value)
    if kind == "module":
        return GroupState(kind, capture_module(value, name, tensors, is_plain=by_torch))
    if kind == "optimizer":
        return GroupState(kind, capture_optimizer(value, name, names, tensors))
    if kind == "generator":
        with tensors.of_rank():
            return GroupState(kind, capture_generator(value, name, tensors))
    if kind == "stateful":
        return GroupState(kind, pack(value.state_dict(), name, tensors))
    packed = pack(value, name, tensors)
    refuse_copies_of_state(value, name)
    return GroupState(kind, packed)
