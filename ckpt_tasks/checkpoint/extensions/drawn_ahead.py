"""Warn of a loop that saves before it has trained all of the last batch: a resume begins with the next one.

The order of three moments tells: the last batch of each loader of the state, the last step of its optimizers, the save.
One such save may be chance (a scaler has skipped the step, a first save); two of them, with a step between, are a form:
a save at the head of a loop, or a batch that is fetched while the one before it is trained. In the body of a `for` over
the loader, a step before the save and one behind it are of the same batch: the resume leaves out the second one.
"""

from __future__ import annotations

import logging
from operator import itemgetter
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.optim import Optimizer

from ckpt_tasks.checkpoint.extension import Extension, Restored
from ckpt_tasks.state.data.ends import moments
from ckpt_tasks.state.data.loader import ResumableLoader
from ckpt_tasks.state.groups import Groups, objects_of
from ckpt_tasks.state.kinds.kinds import may_hold_others
from ckpt_tasks.state.kinds.optimizers import is_ordinary

_log = logging.getLogger("ckpt_tasks")
_AHEAD = (
    "The loop draws a batch, saves, and then trains the batch: a resume from step %d leaves it out. Save behind the "
    "optimizer's step and before the next batch is drawn, or put the drawn batch into the state"
)
_BETWEEN = (
    "The loop saves between two steps of one batch: a resume from step %d begins with the next batch, and leaves out "
    "the steps that are left of this one. Call step() once for a batch, behind its last step"
)


class BatchesDrawnAhead(Extension):
    """Warns once of batches, or of steps of a batch, that a save leaves out."""

    _followed: tuple[Optimizer, ...] = ()
    _stepped_at = _saved_at = 0
    _was_ahead = _has_warned = False
    # The step of the last save, and the loader of the batch that was trained before it.
    _last: tuple[int, ReferenceType[ResumableLoader]] | None = None

    def restored(self, now: Restored) -> None:
        """Follow the steps of the state's optimizers; where a trainer holds the loop, it knows of its batches."""
        found = tuple(value for value in now.state.values() if isinstance(value, Optimizer) and is_ordinary(value))
        self._was_ahead, self._last = False, None
        if not any(map(may_hold_others, now.state.values())):
            for optimizer in found:
                if all(optimizer is not one for one in self._followed):
                    optimizer.register_step_post_hook(self._note_step)
            self._followed = found

    def _note_step(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._stepped_at = next(moments)
        last, self._last = self._last, None
        if last is None or (loader := last[1]()) is None or loader.handed is None:
            return
        if loader.handed[0] < self._saved_at and loader.is_in_for:
            self._has_warned = True
            _log.warning(_BETWEEN, last[0])

    def captured(self, step: int, state: Groups) -> None:
        """Compare the moments of a save with those of the save before it."""
        if self._has_warned or not self._followed:
            return
        before, self._saved_at = self._saved_at, next(moments)
        values = [*objects_of(state)]
        loaders = [(*value.handed, value) for value in values if isinstance(value, ResumableLoader) and value.handed]
        drawn = [(moment, batch) for moment, batch, _ in loaders]
        newest = max(loaders, key=itemgetter(0), default=None)
        self._last = (step, ref(newest[2])) if newest and newest[0] < self._stepped_at else None
        is_ahead = bool(drawn) and before < self._stepped_at < min(moment for moment, _ in drawn)
        held = [batch() for _, batch in drawn if batch]
        if is_ahead and any(value is one for one in held if one is not None for value in values):
            return
        if is_ahead and self._was_ahead:
            self._has_warned = True
            _log.warning(_AHEAD, step)
        self._was_ahead = is_ahead
