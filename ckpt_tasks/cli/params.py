"""Parameters, and where a run was forked from, as every verb shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_tasks.format.ledger import State

__all__ = ["lineage_facts", "params_line", "written"]


def written(value: Any) -> str:
    """Write a parameter's value as it is given to --set."""
    return json.dumps(value)


def params_line(params: Mapping[str, Any]) -> str:
    """Write parameters in one line."""
    return ", ".join(f"{name}={written(value)}" for name, value in params.items())


def lineage_facts(state: State) -> dict[str, Any]:
    """Return where a run was forked from (None: it began by itself) and its parameters, as --json has them."""
    origin, params = state.origin, state.params
    return {"origin": None if origin is None else vars(origin), "params": None if params is None else dict(params)}
