"""A rollback: go back to an older checkpoint, and skip the batches that spoilt the training.

As in PaLM's training (Chowdhery et al., 2022, section 5.1): after a spike of the loss, resume from a checkpoint before
it, and skip the batches that led to it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.keys import MAX_STEP
from ckpt_tasks.format.layout.steps import StepMetrics
from ckpt_tasks.format.policy.spikes import SEEN, STREAK, is_spike
from ckpt_tasks.format.records import Checkpoint, Rollback
from ckpt_tasks.run.ledger.curve import read_curve
from ckpt_tasks.run.ledger.goodput import follow
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.metrics import checked_metrics
from ckpt_tasks.run.ledger.timeline import read_timeline
from ckpt_tasks.state.groups import objects_of

_log = logging.getLogger("ckpt_tasks")


class LeftOut:
    """Skips a rollback's batches when training reaches them.

    `restored` remembers which batches to skip; `at`, called after each step, skips them.
    """

    def __init__(self) -> None:
        self._skip: tuple[int, int] | None = None

    def check(self, rollback: Rollback | None, state: Mapping[str, Any]) -> None:
        """Raise ConfigError if the rollback skips batches and no object of the state can skip them."""
        if rollback is not None and rollback.pending and rollback.skip is not None and not can_leave_out(state):
            first, last = rollback.skip
            raise ConfigError(
                f"batches {first} to {last} are to be left out, and no object of the state has skip_batches(count)",
                hint="Put a ResumableSampler into the state, or roll back again without --skip-batches.",
                step=rollback.step,
            )

    def restored(self, rollback: Rollback | None, step: int, state: Mapping[str, Any]) -> None:
        """Remember which batches remain to be skipped after a restore of `step`; skip them now if they come next.

        Batches skipped before `step` are part of the restored position in the data.
        """
        pending = rollback is not None and rollback.pending and step <= rollback.skips_at
        self._skip = rollback.skip if rollback is not None and pending else None
        self.at(step, state)

    def at(self, step: int, state: Mapping[str, Any]) -> None:
        """Skip the batches if the next step would use the first of them; call this before the step is saved."""
        if self._skip is None or step < self._skip[0] - 1:
            return
        first, last = self._skip
        self._skip = None
        for value in objects_of(state):
            if callable(getattr(value, "skip_batches", None)):
                value.skip_batches(last - first + 1)


class Spikes:
    """Compares each value of one metric with the last steps before it, in rank 0, to find spikes."""

    def __init__(self, metric: str | None):
        self.metric = metric or ""
        self._last: deque[tuple[int, float]] = deque(maxlen=SEEN)
        self._spike: tuple[int, int] | None = None
        self._without = 0

    def seen(self, step: int, metrics: Mapping[str, Any] | None) -> tuple[int, int] | None:
        """Add the metric of a completed step; return a spike's first and last step, in each call until a restore.

        Waits for a metric that is a tensor on a device. Raises StateError if the metric is not a number.
        """
        if not self.metric or self._spike is not None:
            return self._spike
        if not isinstance(metrics, Mapping) or self.metric not in metrics:
            self._without += 1
            if self._without == SEEN and not self._last:
                _log.warning("on_spike watches %r, and %d steps had no such metric", self.metric, SEEN)
            return None
        self._take(step, checked_metrics({self.metric: metrics[self.metric]})[self.metric])
        if is_spike([loss for _, loss in self._last]):
            self._spike = self._last[-STREAK][0], step
        return self._spike

    def restored(self, history: History, parent: Checkpoint | None, newer: Sequence[StepMetrics]) -> None:
        """Add the steps up to `parent` and `newer` ones: a resumed process must know as much as an uninterrupted one.

        Reads the ledger, and the metrics of as many commits as needed. Raises StoreError if the store fails.
        """
        self._spike = None
        self._last.clear()
        if not self.metric:
            return
        steps = [one for one in newer if parent is None or one.step > parent.step]
        commits = [one for one in read_timeline(history).moments if one.kind == "commit"]
        while commits and (parent is None or commits[-1].identity != parent.manifest_digest):
            commits.pop()
        line = follow(commits).line
        for commit in reversed(commits):
            if sum(self.metric in one.metrics for one in steps) >= SEEN:
                break
            if commit.n in line:
                curve = read_curve(history, follow([commit])).steps
                steps = [*(StepMetrics(one.step, one.at_s, one.metrics) for one in curve), *steps]
        for one in steps:
            if self.metric in one.metrics:
                self._take(one.step, float(one.metrics[self.metric]))

    def _take(self, step: int, loss: float) -> None:
        if self._last and self._last[-1][0] == step:  # The step is reported again, by save() after step().
            self._last.pop()
        if math.isfinite(loss):
            self._last.append((step, loss))


def can_leave_out(state: Mapping[str, Any]) -> bool:
    """Return True if an object of the state can skip batches, by a method `skip_batches(count)`."""
    return any(callable(getattr(value, "skip_batches", None)) for value in objects_of(state))


def goes_back(rollback: Rollback | None, newest_first: Sequence[Checkpoint]) -> bool:
    """Return True if nothing was committed after the rollback: restoring a snapshot in memory would undo it."""
    newest = newest_first[0].manifest_digest if newest_first else None
    return rollback is not None and rollback.pending and rollback.identity == newest


def checked_skip(skip: tuple[int, int] | None, step: int) -> tuple[int, int] | None:
    """Return the batches to skip after the checkpoint of `step`; raise ConfigError if they precede it."""
    if skip is not None and not step < skip[0] <= skip[1] <= MAX_STEP:
        raise ConfigError(
            f"batches {skip[0]} to {skip[1]} do not come after step {step}",
            hint=f"Name them by the steps that would take them, from {step + 1} on: 401-410, or how many: 10.",
        )
    return skip


def parse_skip(text: str | None, step: int) -> tuple[int, int] | None:
    """Read "401-410" (the steps that would use the batches) or "10" (how many after `step`) as (first, last).

    Raises ConfigError for any other text.
    """
    if text is None:
        return None
    first, dash, last = (part.strip() for part in text.partition("-"))
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ConfigError(f"{text!r:.80} names no batches", hint='Write "401-410", or how many: "10".')
    return checked_skip((int(first), int(last)) if dash else (step + 1, step + int(first)), step)
