"""Why a checkpoint stays, as far as the ledger alone says: the policy's intervals are the training's."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

from ckpt_tasks.report.words import span

if TYPE_CHECKING:
    from ckpt_tasks.format.ledger import State

__all__ = ["kept_because"]


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
