"""Why a checkpoint stays, as far as the ledger alone says: the policy's intervals are the training's."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

from ckpt_tasks.pages.words import span

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.reading import Run
    from ckpt_tasks.format.ledger import State

__all__ = ["kept_because"]


def kept_because(run: Run, state: State) -> dict[str, list[str]]:
    """Return the reasons for every live checkpoint, by its identity: the newest, the best, pinned, leased."""
    from ckpt_tasks.format.ledger import lineage

    newest_first, now, best = lineage(state.live), time.time(), _best(run, state)
    # What the ledger keeps may be none of its live ones, where somebody has written into it.
    found: dict[str, list[str]] = defaultdict(list, {one.manifest_digest: [] for one in newest_first})
    if newest_first:
        found[newest_first[0].manifest_digest].append("newest")
    if best is not None:
        found[best].append(f"best {state.best_metric}")
    for digest, why in state.pins.items():
        found[digest].append(f"pinned: {why}")
    for lease in state.leases:
        if lease.expires_at > now:
            found[lease.manifest_digest].append(f"leased by {lease.holder}, {span(lease.expires_at - now)}")
    return found


def _best(run: Run, state: State) -> str | None:
    from ckpt_tasks.errors import CheckpointNotFoundError

    try:
        return run.find("best").manifest_digest if state.best_metric is not None else None
    except CheckpointNotFoundError:  # none has the metric yet
        return None
