"""Batches that a rollback leaves out: skipped when training reaches them.

As in PaLM's training (Chowdhery et al., 2022, section 5.1): after a spike of the loss, resume from a checkpoint before
it, and skip the batches that led to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tasks.checkpoint.extension import Extension, Metrics, Restored
from ckpt_tasks.checkpoint.rollback import can_leave_out
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.records import Rollback
from ckpt_tasks.state.groups import objects_of


class LeftOutBatches(Extension):
    """Skips the batches of the last rollback, by the method `skip_batches(count)` of objects of the state."""

    _skip: tuple[int, int] | None = None

    def restoring(self, state: Mapping[str, Any], rollback: Rollback | None) -> None:
        """Raise ConfigError if the rollback skips batches and no object of the state can skip them."""
        if rollback is not None and rollback.pending and rollback.skip is not None and not can_leave_out(state):
            first, last = rollback.skip
            raise ConfigError(
                f"batches {first} to {last} are to be left out, and no object of the state has skip_batches(count)",
                hint="Put a ResumableSampler into the state, or roll back again without --skip-batches.",
                step=rollback.step,
            )

    def restored(self, now: Restored) -> None:
        """Remember which batches remain to be skipped; skip them now if they come next.

        Batches skipped before this step are part of the restored position in the data.
        """
        rollback = now.rollback
        pending = rollback is not None and rollback.pending and now.step <= rollback.skips_at
        self._skip = rollback.skip if rollback is not None and pending else None
        self.stepped(now.step, now.state, {})

    def stepped(self, step: int, state: Mapping[str, Any], metrics: Metrics) -> None:
        """Skip the batches if the next step would use the first of them."""
        if self._skip is None or step < self._skip[0] - 1:
            return
        first, last = self._skip
        self._skip = None
        for value in objects_of(state):
            if callable(getattr(value, "skip_batches", None)):
                value.skip_batches(last - first + 1)
