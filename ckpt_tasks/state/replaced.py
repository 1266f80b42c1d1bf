"""Settings that a restore brings back with other values than the program has just made its objects with.

A learning rate on the command line is gone after a restore, as it should be: the optimizer goes on with its own. Who
meant to change it has to be told. Only new objects are looked at, which have not taken a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["replaced_options", "replaced_settings"]

_SCALARS = (bool, int, float, str)
# What schedules change in param groups while they run: `initial_lr` says what the rate was made with.
_MOVED = frozenset({"max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
_CYCLED = frozenset({"betas", "momentum"})
# Of a schedule: where it is, and the rates that its optimizer's `initial_lr` says already.
_POSITIONS = frozenset({
    "last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "base_lrs", "min_lrs", "max_lrs"
})  # fmt: skip


class Noting(Protocol):
    """Where a difference is noted."""

    def replace(self, place: str, here: object, there: object) -> None: ...


def replaced_options(
    name: str, live: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], noting: Noting
) -> None:
    """Note which options of a new optimizer's param groups the checkpoint has with other values."""
    for n, (here, there) in enumerate(zip(live, saved, strict=False)):
        shared = here.keys() & there.keys()
        left_out = _MOVED | ({"lr"} if "initial_lr" in there else set())
        left_out |= _CYCLED if there.keys() & {"base_momentum", "max_momentum"} else set()
        for key in sorted(shared - left_out):
            if _differ(here[key], there[key]):
                place = f"{name} {'lr' if key == 'initial_lr' else key}"
                noting.replace(place if len(live) == 1 else f"{place} of param group {n}", here[key], there[key])


def replaced_settings(name: str, live: Mapping[str, Any], saved: Any, noting: Noting) -> None:
    """Note which settings of a new schedule the checkpoint has with other values."""
    if not isinstance(saved, Mapping) or live.get("last_epoch") != 0:
        return
    for key in sorted(live.keys() & saved.keys() - _POSITIONS):
        if not key.startswith("_") and _differ(live[key], saved[key]):
            noting.replace(f"{name} {key}", live[key], saved[key])


def _differ(here: Any, there: Any) -> bool:
    return _is_plain(here) and _is_plain(there) and here != there


def _is_plain(value: Any) -> bool:
    return type(value) in _SCALARS or (type(value) in (list, tuple) and all(type(one) in _SCALARS for one in value))
