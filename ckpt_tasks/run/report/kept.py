"""Why each live checkpoint of a run is kept."""

from __future__ import annotations

import time
from collections import defaultdict

from ckpt_tasks.format.ledger import State, lineage
from ckpt_tasks.format.policy.retention import RetentionPolicy, rank_best
from ckpt_tasks.run.report.words import span


def kept_because(state: State) -> dict[str, list[str]]:
    """Return why each live checkpoint is kept, by manifest digest: newest, best, pinned, leased."""
    newest_first, now = lineage(state.live), time.time()
    # An edited ledger may pin a checkpoint that is not live, hence the defaultdict.
    reasons: dict[str, list[str]] = defaultdict(list, {checkpoint.manifest_digest: [] for checkpoint in newest_first})
    for newest in newest_first[:1]:
        reasons[newest.manifest_digest].append("newest")
    policy = RetentionPolicy(keep_best=1, best_metric=state.best_metric, best_mode=state.best_mode)
    for best in rank_best(newest_first, policy, state.evaluated):
        reasons[best.manifest_digest].append(f"best {state.best_metric}")
    for digest, why in state.pins.items():
        reasons[digest].append(f"pinned: {why}")
    for lease in state.leases:
        if lease.expires_at > now:
            reasons[lease.manifest_digest].append(f"leased by {lease.holder}, {span(lease.expires_at - now)}")
    return reasons
