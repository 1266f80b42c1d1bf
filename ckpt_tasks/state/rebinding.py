"""Values that a loop gives a new object, while the state keeps the first one: a resume would begin with it."""

from __future__ import annotations

import dis
from collections.abc import Mapping
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import numpy as np

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.tree import SCALARS
from ckpt_tasks.state.groups import flat
from ckpt_tasks.state.kinds.kinds import kind_of

_BACK = ("JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")


def refuse_rebound(state: Mapping[str, Any], loop: FrameType | None) -> None:
    """Raise ConfigError for values of a state that a loop cannot change in place, or that it gives a new object.

    `loop`: the frame that has made the state, and that the loop runs in.
    """
    rebound = _rebound_names(loop.f_code, loop.f_lasti) if loop is not None else set()
    variables = {**loop.f_globals, **loop.f_locals} if loop is not None else {}
    for name, value in flat(state).items():
        own = next((variable for variable in rebound if variables.get(variable) is value), None)
        if kind_of(value) == "plain" and (_is_fixed(value) or own):
            lost = (
                f"the loop gives {own} a new object" if own else f"a {type(value).__name__} cannot be changed in place"
            )
            raise ConfigError(
                f"{lost}, and every save would hold its first value",
                key=name,
                hint=f'Give a dict, {name}={name} with {name} = {{"value": …}}, and set {name}["value"] in the loop.',
            )


def _is_fixed(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_fixed, value))
    return value is None or type(value) in SCALARS or isinstance(value, (int, float, str, bytes, np.generic))


def _rebound_names(code: CodeType, begin: int) -> set[str]:
    """Return the variables that a loop behind an instruction assigns to; `x += …` leaves an object as it is."""
    instructions = [one for one in dis.get_instructions(code) if one.offset > begin]
    loops = [(one.argval, one.offset) for one in instructions if one.opname in _BACK and one.argval > begin]
    return {
        store.argval
        for before, store in pairwise(instructions)
        if store.opname in ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
        and not (before.opname == "BINARY_OP" and before.argrepr.endswith("="))
        and any(first <= store.offset <= last for first, last in loops)
    }
