"""Metrics that are not finite, and a metric that spikes: warn, stop, or go back to an older checkpoint."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tasks.checkpoint.extension import Extension, Metrics, Restored
from ckpt_tasks.checkpoint.rollback import can_leave_out
from ckpt_tasks.errors import NonFiniteError, SpikeError
from ckpt_tasks.format.layout.steps import StepMetrics
from ckpt_tasks.format.policy.spikes import SEEN, STREAK, is_spike
from ckpt_tasks.format.records import Checkpoint, Rollback
from ckpt_tasks.run.ledger.curve import read_curve, read_steps_file
from ckpt_tasks.run.ledger.goodput import follow
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.metrics import GoingBack, checked_metrics, is_here, number_of
from ckpt_tasks.run.ledger.timeline import read_timeline

_log = logging.getLogger("ckpt_tasks")
_WARNING = (
    "Step %d: %s; training continues, and such a step is never the best one. on_non_finite='stop' would end training "
    "here, and 'rollback' would go back to an older checkpoint"
)


class GoingBackFromBadMetrics(Extension):
    """Does what `on_non_finite` and `on_spike` say.

    Consecutive bad steps give one warning. A tensor on a device is checked only when its step is saved, since reading
    it waits for the device, and the save reads it anyway.
    """

    _warned = False

    def __post_init__(self) -> None:
        self._back = GoingBack()
        self._spikes = _Spikes(self.config.on_spike)

    def goes_back(self) -> bool:
        """Return True if a bad step asks for an older checkpoint."""
        return self._back.failed_step is not None

    def remembers(self, facts: Mapping[str, Any]) -> None:
        """Go back before steps whose metrics were bad in a previous process."""
        self._back = GoingBack(**facts)

    def older(self, known: Sequence[Checkpoint]) -> list[Checkpoint] | None:
        """Return the checkpoints before a bad step; raises NonFiniteError or SpikeError if there is none."""
        return self._back.older(known) if self.goes_back() else None

    def returned(self, chosen: Checkpoint, state: Mapping[str, Any]) -> tuple[Rollback, Mapping[str, Any]] | None:
        """Return the rollback to a checkpoint before the bad step, if there was one.

        If an object of the state can skip batches, the batches up to that step are skipped: they would fail again.
        """
        failed_step = self._back.went_back(chosen.step)
        if failed_step is None:
            return None
        skip = (chosen.step + 1, failed_step) if can_leave_out(state) and chosen.step < failed_step else None
        rollback = Rollback(identity=chosen.manifest_digest, step=chosen.step, skip=skip)
        return rollback, {"failed": failed_step, **self._back.event}

    def restored(self, now: Restored) -> None:
        """Know as much of the metric as a process that was not interrupted."""
        if now.first and self.history is not None and not now.begins:
            self._spikes.restored(self.history, now.parent, read_steps_file(now.uncommitted) if now.uncommitted else ())

    def wish(self, step: int, metrics: Metrics | None) -> str | None:
        """Return a spike's first and last step."""
        spike = self._spikes.seen(step, metrics)
        return None if spike is None else f"spike {spike[0]} {spike[1]}"

    def agreed(self, wish: str) -> None:
        """Raise SpikeError in all ranks; the next restore goes back before the spike."""
        kind, *steps = wish.split()
        if kind != "spike":
            return
        began, step = map(int, steps)
        self._back.failed(step, began)
        error = SpikeError(
            f"{self._spikes.metric} has spiked since step {began}, and on_spike goes back: this step is not saved",
            step=step,
            key=self._spikes.metric,
            hint="Call restore(): it goes back to the newest checkpoint before the spike.",
        )
        error.rolls_back, error.began = True, began
        raise error

    def check(self, step: int, metrics: Metrics, *, saving: bool) -> None:
        """Warn, or raise NonFiniteError, if a metric is NaN or infinite."""
        numbers = {name: number_of(name, value) for name, value in metrics.items() if saving or is_here(value)}
        bad = [name for name, value in numbers.items() if not math.isfinite(value)]
        if bad:
            self._act(step, ", ".join(f"{name} is {numbers[name]}" for name in bad), bad[0])
        elif numbers:  # A step without metrics does not end consecutive bad steps.
            self._warned = False
            self._back.passed(step)

    def _act(self, step: int, message: str, key: str) -> None:
        goes_back = self.config.on_non_finite == "rollback"
        if self.config.on_non_finite == "warn":
            if not self._warned:
                _log.warning(_WARNING, step, message)
            self._warned = True
            return
        hint = "The checkpoints before it stand. Restore an older one, and change what made it diverge."
        if goes_back:
            self._back.failed(step)
            hint = "Call restore(): it goes back to the newest checkpoint with finite metrics."
        message = f"{message}, and on_non_finite is {self.config.on_non_finite!r}: this step is not saved"
        error = NonFiniteError(message, step=step, key=key, hint=hint)
        error.rolls_back = goes_back
        raise error


class _Spikes:
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
