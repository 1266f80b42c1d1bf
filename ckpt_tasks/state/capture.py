"""Capture of a state: everything that a resumed training needs, as trees of plain values and live tensors.

A *state* is a dict; each key names a *group*. A value is a module, an optimizer, a random generator, another object
with state_dict and load_state_dict, or a plain value: tensors, arrays, numbers, strings and containers of them.
`capture` copies only containers: the caller must copy the tensors before training changes them.

The kind of a group decides how its values may differ between ranks (`KINDS` in state/kinds/kinds.py); `ByRank`
overrides the kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from ckpt_tasks.errors import CkptError
from ckpt_tasks.format.saved_kinds import RNG
from ckpt_tasks.gc_pause import gc_paused
from ckpt_tasks.state.groups import flat
from ckpt_tasks.state.kinds.group_parts import Captured, GroupState
from ckpt_tasks.state.kinds.kinds import KINDS, kind_of
from ckpt_tasks.state.kinds.names import Scope
from ckpt_tasks.state.structure import Structure
from ckpt_tasks.state.tensors.placements import ALONE, World, reshard
from ckpt_tasks.state.tensors.random_streams import current_streams, preserved_rng
from ckpt_tasks.state.tensors.tensors import RankRule, TensorSet

_ORDER = [*KINDS]


def capture(
    state: Mapping[str, Any],
    *,
    rng: bool = True,
    world: World = ALONE,
    parent: str | None = None,
    structure: Structure | None = None,
) -> Captured:
    """Capture a state and, with `rng`, the random streams of the process.

    Draws no random number and changes nothing. A user's state_dict() may draw numbers: `capture` then resets only the
    streams that moved, since other threads may draw meanwhile. Tensors with the same memory, dtype, shape and strides
    are captured once, even across groups. `parent`: the identity of the checkpoint that a save of this state would
    follow. `structure` remembers what this capture finds for the next one. In a `world` of many ranks the result has
    only the tensors that this rank writes. Raises UnsupportedStateError with the path ("group/name/…") of a value that
    cannot be stored.
    """
    state = flat(state)
    own, modules = state.by_rank, state.modules
    reshard(modules.values())
    structure = structure if structure is not None and world.size == 1 else Structure(remembers=False)
    streams = current_streams() if rng else {}
    with gc_paused():
        scope = Scope(state, modules, state.can_assign, parent)
        kinds = {name: kind_of(value) for name, value in state.items()}
        order = sorted(state, key=lambda name: _ORDER.index(kinds[name]))
        captured, tensors = structure.recall(state, order, kinds) or ({}, TensorSet(world))
        for name in order[len(captured) :]:
            rule = RankRule.BY_RANK if name in own else KINDS[kinds[name]].rule
            with tensors.by(rule):
                captured[name] = GroupState(kinds[name], _tree(kinds[name], state[name], name, scope, tensors))
            structure.note(captured, tensors)
    groups = {name: captured[name] for name in state}
    if rng:
        with tensors.by(KINDS[RNG].rule):
            groups[RNG] = GroupState(RNG, KINDS[RNG].capture(streams, RNG, scope, tensors, False))
    for name, group in groups.items() if world.size > 1 else ():
        buffers = tuple(key.removeprefix(f"{name}/") for key in tensors.buffers if key.startswith(f"{name}/"))
        groups[name] = replace(
            group, by_rank=name in own or KINDS[group.kind].rule is RankRule.BY_RANK, buffers=buffers
        )
    return Captured(
        groups,
        tensors.tensors,
        structure.frozen(scope, tensors),
        tensors.places,
        tensors.replicated,
        tensors.one_for_all,
        tensors.files,
        tensors.constant,
    )


def _tree(kind: str, value: Any, name: str, scope: Scope, tensors: TensorSet) -> Any:
    draws = KINDS[kind].draws(value)
    try:
        with preserved_rng() if draws else nullcontext():
            return KINDS[kind].capture(value, name, scope, tensors, draws)
    except Exception as error:
        if not isinstance(error, CkptError):  # Raise an error of the user's object unchanged.
            error.add_note(f"It was raised while {name} was read for a checkpoint; nothing of it was written.")
        raise
