"""Warn before the disk is full: what the policy will need at its peak against what is free, before each save.

It warns once and refuses nothing: others may free the room in time, and a quota is not seen (docs/decisions/0071).
"""

from __future__ import annotations

import logging

from ckpt_tasks.format.ledger import State
from ckpt_tasks.policy.retention import RetentionPolicy
from ckpt_tasks.policy.space import CheckpointSize, forecast
from ckpt_tasks.storage.port import Store
from ckpt_tasks.storage.space import free_bytes

__all__ = ["SpaceWatch"]

_log = logging.getLogger("ckpt_tasks")


class SpaceWatch:
    """Forecast the room of one run, for its owner."""

    def __init__(self, store: Store, policy: RetentionPolicy):
        self._store = store
        self._policy = policy
        self._warned = False

    def look(self, state: State, size: CheckpointSize) -> None:
        """Log a warning if the room will not do; once, and never where the store has no limit that it tells."""
        free = None if self._warned or not size.own_bytes else free_bytes(self._store)
        if free is None:
            return
        peak = forecast(self._policy, state.live, pinned=state.pins, size=size, free_bytes=free)
        if peak.fits:
            return
        self._warned = True
        fewer = "Prune it, or set max_num_checkpoints" if peak.grows else "Set a smaller max_num_checkpoints"
        _log.warning("%s will run out of room: %s. %s, or use another disk.", self._store.url, peak.words, fewer)
