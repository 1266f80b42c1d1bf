"""A warning before the disk is full: before each save, the policy's peak is compared with the free space.

It warns once and never refuses a save: other programs may free the space in time, and quotas are not considered
(docs/internals/decisions/0071).
"""

from __future__ import annotations

import logging

from ckpt_tasks.checkpoint.extension import Extension
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.policy.space import CheckpointSize, forecast
from ckpt_tasks.storage.locations import free_bytes

_log = logging.getLogger("ckpt_tasks")


class SpaceForecast(Extension):
    """Warns once if the disk lacks the room that the policy will need."""

    _warned = False

    def admitted(self, state: State, size: CheckpointSize) -> None:
        """Log a warning once if the space will not suffice; do nothing for a store without a known limit."""
        assert self.history is not None
        store = self.history.store
        free = None if self._warned or not size.own_bytes else free_bytes(store)
        if free is None:
            return
        peak = forecast(self.config.retention_policy, state.live, pinned=state.pins, size=size, free_bytes=free)
        if peak.fits:
            return
        self._warned = True
        fewer = "Prune it, or set max_num_checkpoints" if peak.grows else "Set a smaller max_num_checkpoints"
        _log.warning("%s will run out of room: %s. %s, or use another disk.", store.url, peak.words, fewer)
