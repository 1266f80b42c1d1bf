"""The steps of a loop that reports none: a batch counts if an optimizer of the state has stepped since."""

from __future__ import annotations

import logging
from typing import Any

from ckpt_tasks.system import system

_log = logging.getLogger("ckpt_tasks")
_MOST_S = 60.0
_NO_STEPS = (
    "The loop has taken %d batches %s, and no optimizer of the state has stepped: such batches are neither counted nor "
    "saved. Give resumable() the optimizer whose step() the loop calls. A loop that makes a new optimizer, or never "
    "calls its step(), needs a Checkpointer"
)


class Steps:
    """Counts the batches after which an optimizer has stepped, and warns once if there are none."""

    def __init__(self, number: int, *, counts_batches: bool):
        self.number = self.saved = number
        self._counts_batches, self._is_resumed = counts_batches, number > 0
        self.has_stepped = False
        self.taken = 0  # The number of calls of an optimizer's step().
        self._batches = self._most = 0  # Batches since the last step, and the most between two steps.
        self._in_epoch: list[int] = [0, 0]  # Batches and steps of this epoch.
        self._since_s: float | None = None  # When the batch behind the last step was taken.
        self._has_warned = False

    @property
    def unsaved(self) -> bool:
        return self.number > self.saved

    def note(self, *_: Any) -> None:
        """Record that an optimizer has stepped; each optimizer calls this as a hook."""
        self.has_stepped = True
        self.taken += 1

    def handed_out(self) -> None:
        self.has_stepped = self.has_stepped or self._counts_batches
        self._batches += 1
        self._in_epoch[0] += 1
        now_s = system().monotonic()
        if self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s > _MOST_S and self._batches > 2 * self._most + 1:
            self._warn(f"in {now_s - self._since_s:.0f} s")

    def end(self) -> bool:
        """End the current step if one has begun."""
        stepped, self.has_stepped = self.has_stepped, False
        self.number += stepped
        self._in_epoch[1] += stepped
        if stepped:
            self._most, self._batches, self._since_s = max(self._most, self._batches), 0, None
        return stepped

    def end_epoch(self, *, whole: bool) -> None:
        """Warn if the loop has taken batches of an epoch, and no step; `whole`: from its first batch on."""
        batches, steps = self._in_epoch
        if whole and batches > self._most and not steps:
            self._warn("in an epoch")
        self._in_epoch = [0, 0]

    def end_run(self) -> None:
        """Warn if the run ends so; a rest that is too small for a step is none."""
        if self._batches > 2 * self._most + 1 and (self._most or not self._is_resumed):
            self._warn("since its last step")

    def _warn(self, when: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(_NO_STEPS, self._batches, when)
