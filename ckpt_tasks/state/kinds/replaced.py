"""Settings that a restore replaces, because the checkpoint has other values than the program has just set.

After a restore the optimizer continues with its old learning rate, not with a new one from the command line. We warn
the user, who may have wanted a change. We compare only new objects, which have not taken a step.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ckpt_tasks.state.kinds.differences import Differences

_SCALARS = (bool, int, float, str)
# Schedules change these options while they run; `initial_lr` keeps the original rate.
_MOVED = frozenset({"max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
_CYCLED = frozenset({"betas", "momentum"})
# The position of a schedule, or rates that the optimizer's `initial_lr` also has.
_POSITIONS = frozenset({
    "last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "base_lrs", "min_lrs", "max_lrs"
})  # fmt: skip


def replaced_options(
    name: str,
    optimizer: Optimizer,
    saved: Sequence[Mapping[str, Any]],
    differences: Differences,
    begun: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Record the options of a new optimizer's param groups that have other values in the checkpoint.

    `begun`: the first values of options that the run's loop has changed itself; such a program has not changed them.
    """
    notes: list[dict[str, tuple[Any, Any]]] = []
    counted = _counted(optimizer)
    firsts = begun or [{}] * len(saved)
    for own, there, first in zip(optimizer.param_groups, saved, firsts, strict=False):
        # A later schedule starts from the current rate, except a schedule that sets one of these two options.
        here = own if there.keys() & {"max_lr", "base_momentum"} else {"initial_lr": own.get("lr"), **own}
        left_out = counted | _MOVED | ({"lr"} if "initial_lr" in there else set())
        left_out |= _CYCLED if there.keys() & {"base_momentum", "max_momentum"} else set()
        shared = sorted((here.keys() & there.keys()) - left_out)
        note = {key: (here[key], there[key]) for key in shared if _differ(here[key], there[key])}
        note = {key: pair for key, pair in note.items() if pair[0] != first.get(key)}
        if "lr" in note and _is_lowered(optimizer, len(notes), *note["lr"]):
            del note["lr"]
        notes.append(note)
    alike = all(note == notes[0] for note in notes)
    for n, note in enumerate(notes[:1] if alike else notes):
        for key, values in note.items():
            place = f"{name} {'lr' if key == 'initial_lr' else key}"
            differences.replace(place if alike else f"{place} of param group {n}", *values)


def _is_lowered(optimizer: Optimizer, n: int, here: float, there: float) -> bool:
    """Return True if an optimizer's plateau schedule can lower the rate of param group n from `here` to `there`.

    A plateau schedule sets no `initial_lr`, and is often missing in the state, so look for it among all objects.
    """
    for schedule in gc.get_objects():
        if not issubclass(type(schedule), ReduceLROnPlateau) or schedule.optimizer is not optimizer:
            continue
        rate, lower = here, max(here * schedule.factor, schedule.min_lrs[n])
        while rate > there and rate - lower > schedule.eps:
            rate, lower = lower, max(lower * schedule.factor, schedule.min_lrs[n])
        if rate == there:
            return True
    return False


def _counted(optimizer: Optimizer) -> frozenset[str]:
    """Return the options in param groups that the optimizer itself counts; its constructor has no argument for them.

    Examples are `k`, `weight_sum` and `train_mode` of schedulefree.
    """
    makers = [vars(kind)["__init__"] for kind in type(optimizer).__mro__ if "__init__" in vars(kind)]
    return frozenset(optimizer.defaults.keys() - {name for make in makers for name in signature(make).parameters})


def replaced_settings(name: str, live: Mapping[str, Any], saved: Any, differences: Differences) -> None:
    """Record the settings of a new schedule that have other values in the checkpoint."""
    if not isinstance(saved, Mapping) or live.get("last_epoch") != 0:
        return
    for key in sorted(live.keys() & saved.keys() - _POSITIONS):
        if not key.startswith("_") and _differ(live[key], saved[key]):
            differences.replace(f"{name} {key}", live[key], saved[key])


def _differ(here: Any, there: Any) -> bool:
    return _is_plain(here) and _is_plain(there) and here != there


def _is_plain(value: Any) -> bool:
    return type(value) in _SCALARS or (type(value) in (list, tuple) and all(type(one) in _SCALARS for one in value))
