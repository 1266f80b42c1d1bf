"""Facts that several verbs show: why a checkpoint stays, parameters, and where a run was forked from."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt_tasks.report.words import span

if TYPE_CHECKING:
    from ckpt_tasks.format.ledger import State

__all__ = ["kept_because", "lineage_facts", "params_line", "written"]


def kept_because(state: State) -> dict[str, list[str]]:
    """Return the reasons for every live checkpoint, by its identity: the newest, the best, pinned, leased."""
    from ckpt_tasks.format.ledger import lineage
    from ckpt_tasks.policy.retention import RetentionPolicy, rank_best

    newest_first, now = lineage(state.live), time.time()
    # What the ledger keeps may be none of its live ones, where somebody has written into it.
    found: dict[str, list[str]] = defaultdict(list, {one.manifest_digest: [] for one in newest_first})
    for newest in newest_first[:1]:
        found[newest.manifest_digest].append("newest")
    policy = RetentionPolicy(keep_best=1, best_metric=state.best_metric, best_mode=state.best_mode)
    for best in rank_best(newest_first, policy, state.evaluated):
        found[best.manifest_digest].append(f"best {state.best_metric}")
    for digest, why in state.pins.items():
        found[digest].append(f"pinned: {why}")
    for lease in state.leases:
        if lease.expires_at > now:
            found[lease.manifest_digest].append(f"leased by {lease.holder}, {span(lease.expires_at - now)}")
    return found


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
