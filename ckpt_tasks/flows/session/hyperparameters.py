"""Apply changed parameters of a fork to a state that was restored with the old ones.

A restore brings back the options of optimizers and schedules, so the program's new learning rate would be lost
silently. To find what the user changed, the program is built twice, with the old parameters and with the new ones: the
settings that differ between the two have changed. This decision works on plain values; `settings_of` reads them, and
`apply_settings` writes them.

Only options of param groups and the state of learning-rate schedules are compared. Everything else in a state (weights,
moments, counts, positions in the data) comes from the checkpoint; values outside a program's state are new anyway.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckpt_tasks.errors import StateMismatchError
from ckpt_tasks.format.tree import children
from ckpt_tasks.state.groups import flat

_NOT_OPTIONS = ("params", "param_names")
_ABSENT = object()


@dataclass(frozen=True)
class Settings:
    """The options of each optimizer's param groups, and the state_dict of each schedule."""

    groups: Mapping[str, list[dict[str, Any]]]
    schedules: Mapping[str, Any]


def settings_of(state: Mapping[str, Any]) -> Settings:
    """Return copies of the settings of every optimizer and learning-rate schedule in a state."""
    state = flat(state)
    groups = {
        name: [{key: _plain(value) for key, value in group.items() if key not in _NOT_OPTIONS} for group in groups]
        for name, groups in ((n, one.param_groups) for n, one in state.items() if isinstance(one, Optimizer))
    }
    schedules = {name: copy.deepcopy(one.state_dict()) for name, one in state.items() if isinstance(one, LRScheduler)}
    return Settings(groups, schedules)


def changed_settings(restored: Settings, old: Settings, new: Settings) -> Settings:
    """Return the restored settings, with the new values where a fresh old program and a fresh new one differ.

    A learning rate that training has moved is scaled by new/old. Raises StateMismatchError if the two programs have
    other optimizers, schedules or numbers of param groups.
    """
    for settings in (old, restored):
        if _outline(settings) != _outline(new):
            raise StateMismatchError(
                "the changed parameters make other optimizers, schedules or param groups",
                hint="Only values can change in a fork: learning rates, weight decay, lengths of schedules …",
            )
    groups = {
        name: [_options(*three) for three in zip(groups, old.groups[name], new.groups[name], strict=True)]
        for name, groups in restored.groups.items()
    }
    schedules = {
        name: _schedule(restored.schedules[name], old.schedules[name], new.schedules[name])
        for name in restored.schedules
    }
    return Settings(groups, schedules)


def alike(one: Settings, other: Settings) -> bool:
    """Return True if two fresh programs have equal settings."""
    return not _differ([one.groups, one.schedules], [other.groups, other.schedules])


def apply_settings(state: Mapping[str, Any], settings: Settings) -> None:
    """Set a state's optimizers and schedules to these settings, except values that are equal already."""
    state, before = flat(state), settings_of(state)
    for name, schedule in settings.schedules.items():
        if _differ(before.schedules[name], schedule):
            state[name].load_state_dict(copy.deepcopy(schedule))
    for name, groups in settings.groups.items():
        for live, was, options in zip(state[name].param_groups, before.groups[name], groups, strict=True):
            for key in was.keys() - options.keys():
                del live[key]
            for key, value in options.items():
                if _differ(was.get(key, _ABSENT), value):
                    _set(live, key, value)


def _options(restored: dict[str, Any], old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = _merged(restored, old, new)
    if "lr" in restored and "lr" in old and "lr" in new:
        bases = tuple(one.get("initial_lr") for one in (restored, old, new))
        merged["lr"] = _moved((restored["lr"], old["lr"], new["lr"]), bases)
    return merged


def _schedule(restored: Any, old: Any, new: Any) -> Any:
    """Merge the state_dict of a schedule, nested schedules included."""
    if type(restored) is list and type(old) is list and type(new) is list and len(restored) == len(old) == len(new):
        return [_schedule(*three) for three in zip(restored, old, new, strict=True)]
    if not (type(restored) is dict and type(old) is dict and type(new) is dict):
        return _merged(restored, old, new)
    merged: dict[str, Any] = _merged(restored, old, new)
    if "_schedulers" in merged:
        merged["_schedulers"] = _schedule(restored["_schedulers"], old["_schedulers"], new["_schedulers"])
    rates: list[Any] = [one.get("_last_lr") for one in (restored, old, new)]
    if all(type(one) is list for one in rates) and len({len(one) for one in rates}) == 1:
        bases = [one.get("base_lrs") or [None] * len(rates[0]) for one in (restored, old, new)]
        merged["_last_lr"] = [_moved(*pair) for pair in zip(_turned(rates), _turned(bases), strict=True)]
    return merged


def _moved(rates: Sequence[Any], bases: Sequence[Any]) -> Any:
    """Return the new learning rate; both tuples hold (restored, fresh old, fresh new).

    A schedule derives the rate from its base, so the ratio of the bases scales it, even if the schedule begins at zero.
    The restored base is the one with which the parent was trained.
    """
    rate, old, new = rates
    base, old_base, new_base = bases
    if None not in bases:
        old, new = (base, new_base) if _differ(old_base, new_base) else (old_base, old_base)
    if not _differ(old, new):
        return rate
    if not _differ(rate, old) or not old:
        return new
    return rate * (new / old)


def _turned(rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True))


def _merged(restored: Any, old: Any, new: Any) -> Any:
    """Return the restored value, or the new one if the fresh values differ; dicts and lists are merged by item."""
    kinds, sides = {*map(type, (restored, old, new))}, [dict(children(one)) for one in (restored, old, new)]
    if kinds == {dict} or (kinds == {list} and len({*map(len, sides)}) == 1):
        merged = {key: _merged(*(side.get(key, _ABSENT) for side in sides)) for key in {**sides[0], **sides[2]}}
        kept = {key: value for key, value in merged.items() if value is not _ABSENT}
        return kept if kinds == {dict} else [*kept.values()]
    return new if _differ(old, new) else restored


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        alike = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return not (alike and torch.equal(one, other))
    if type(one) is type(other) and isinstance(one, (dict, list, tuple)):
        if len(one) != len(other):
            return True
        if isinstance(one, dict):
            return any(key not in other or _differ(value, other[key]) for key, value in one.items())
        return any(_differ(*pair) for pair in zip(one, other, strict=True))
    return bool(one != other)


def _plain(value: Any) -> Any:
    # A learning rate may be a tensor, so that a CUDA graph can read it.
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else copy.deepcopy(value)


def _set(live: dict[str, Any], key: str, value: Any) -> None:
    held = live.get(key)
    if isinstance(held, torch.Tensor) and isinstance(value, (int, float)):
        held.fill_(value)  # Set it in place: a CUDA graph may read this tensor.
    else:
        live[key] = copy.deepcopy(value)


def _outline(settings: Settings) -> tuple[dict[str, int], set[str]]:
    return {name: len(groups) for name, groups in settings.groups.items()}, set(settings.schedules)
