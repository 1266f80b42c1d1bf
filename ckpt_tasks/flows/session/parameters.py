"""The parameters with which a program is built: the flow's parameters, and parameters recorded in the run's ledger.

Anyone who can write to the run's directory can write its ledger, and a factory may open files that its parameters name.
So the flow's parameters take precedence. A recorded parameter is used only if the factory's signature has its name and
its value cannot name a file: a number, a boolean, null, or a list of these. If a program needs other recorded
parameters, it lists their names in an attribute `recorded_params`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_tasks.errors import ProgramError

_log = logging.getLogger("ckpt_tasks")


def effective_params(
    factory: Callable[..., Any], recorded: Mapping[str, Any] | None, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the parameters with which to build a program: the given ones, and recorded values for all others.

    Raises ProgramError if a recorded parameter must not reach `factory`: without it the program would be different.
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
    """Return the parameters of the old program, to compare it with the program that is built with `given`.

    A recorded value that must not reach the factory is replaced by the value in `given`, with a warning.
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
    """Return the recorded parameters that must not reach a factory: name → reason."""
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
    """Return the parameters that can be given by name; names that only `**` accepts do not count."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # A builtin may have no signature.
        return set()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters if parameter.kind in by_name}


def _names_nothing(value: Any) -> bool:
    if isinstance(value, list):
        return all(_names_nothing(item) for item in value)
    return value is None or isinstance(value, bool | int | float)
