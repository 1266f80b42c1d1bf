"""With what parameters a program is built: what a flow is given, and what the run's ledger may add to it.

A ledger is written by everyone who can write to the run's directory, and a factory opens the files that its parameters
name. So given parameters win, and a recorded one is used only if the factory's signature names it and its value cannot
name anything: a number, a boolean, null, or a list of these. The program names the others that it takes from the
record, in an attribute `recorded_params`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_tasks.errors import ProgramError

__all__ = ["effective_params", "params_before"]

_log = logging.getLogger("ckpt_tasks")


def effective_params(
    factory: Callable[..., Any], recorded: Mapping[str, Any] | None, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return with what a program is built: what is given, and what the run has recorded of everything else.

    Raises ProgramError for a recorded parameter that `factory` must not be called with: without it, the program would
    be another one.
    """
    given = given or {}
    missing = {name: value for name, value in (recorded or {}).items() if name not in given}
    if refused := _refused(factory, missing):
        name, why = next(iter(refused.items()))
        raise ProgramError(
            f"the run records a parameter {name!r:.80} that is not taken from there: {why}",
            hint="Give it again, in `params`. Who can write to the run's directory chooses what it records.",
        )
    return {**missing, **given}


def params_before(factory: Callable[..., Any], recorded: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return with what a program was built before, to compare it with the one that is built with `given`.

    Where a recorded value must not reach the factory, that of `given` stands in for it, and a warning says so.
    """
    held = {name: given[name] for name in _refused(factory, recorded) if name in given}
    if changed := sorted(name for name in held if recorded[name] != held[name]):
        _log.warning(
            "another %s than before: what it sets in optimizers and schedules stays as it was restored (to compare, "
            "the program must name it in `recorded_params`)",
            ", ".join(changed),
        )
    return effective_params(factory, recorded, held)


def _refused(factory: Callable[..., Any], recorded: Mapping[str, Any]) -> dict[str, str]:
    """Return which recorded parameters a factory must not be called with, and why."""
    if not recorded:
        return {}
    declared, allowed = _declared(factory), frozenset(getattr(factory, "recorded_params", ()))
    undeclared = "the program does not declare it by its name"
    text = "it may name a file, and `recorded_params` of the program does not name it"
    return {
        name: text if name in declared else undeclared
        for name, value in recorded.items()
        if name not in declared or not (name in allowed or _names_nothing(value))
    }


def _declared(factory: Callable[..., Any]) -> set[str]:
    """Return what can be given by name; what only a `**` takes is not declared."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # a builtin that has no signature
        return set()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {one.name for one in parameters if one.kind in by_name}


def _names_nothing(value: Any) -> bool:
    if isinstance(value, list):
        return all(_names_nothing(item) for item in value)
    return value is None or isinstance(value, bool | int | float)
