"""The metrics of every step: collected between commits and written with each commit; `curve.py` reads them.

A commit's table holds the steps that its checkpoint adds to its parent's; the entry's event names the table. So the
curve shows committed steps only: a step that was trained, lost and trained again has the metrics of its last training,
and steps of abandoned lines are marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tasks.checkpoint.extension import Extension, Metrics, Restored
from ckpt_tasks.checkpoint.save.listening import Listeners
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import STEPS_NAME, Attempt, steps_name
from ckpt_tasks.format.layout.steps import StepMetrics, steps_file, write_steps
from ckpt_tasks.run.ledger.curve import read_steps_file
from ckpt_tasks.storage.port import Store
from ckpt_tasks.system import system


class StepLog(Extension):
    """The metrics of the steps that are not known to be committed, in the order of their reports."""

    most = 1 << 18  # Above this many uncommitted steps every second one is dropped.

    def __post_init__(self) -> None:
        self._steps: list[StepMetrics] = []

    def restored(self, now: Restored) -> None:
        """Start from a checkpoint, or from a snapshot in memory with its uncommitted steps."""
        self._steps = [*read_steps_file(now.uncommitted)] if now.uncommitted else []

    def stepped(self, step: int, state: Mapping[str, Any], metrics: Metrics) -> None:
        """Add metrics of a step to its earlier metrics."""
        if not metrics:
            return
        if self._steps and self._steps[-1].step == step:
            metrics = {**self._steps.pop().metrics, **metrics}
        if len(self._steps) >= self.most:
            del self._steps[::2]
        self._steps.append(StepMetrics(step, system().time(), metrics))

    def attached(self, after: int) -> AttachedSteps | None:
        """Return the steps after a committed step, and forget the earlier ones."""
        self._steps = [entry for entry in self._steps if entry.step > after]
        return AttachedSteps(tuple(self._steps)) if self._steps else None


class AttachedSteps:
    """The steps whose metrics are stored with a snapshot, if no commit has them meanwhile."""

    def __init__(self, steps: tuple[StepMetrics, ...]):
        self.steps = steps

    def files(self) -> dict[str, bytes]:
        """Return the file beside a snapshot in memory."""
        return {STEPS_NAME: steps_file(self.steps)}

    def put(self, store: Store, attempt: Attempt, after: int) -> dict[str, object]:
        """Put the table of the steps after `after`; this waits for tensors on a device."""
        new = (entry for entry in self.steps if entry.step > after)
        self.steps = tuple(e._replace(metrics={name: float(value) for name, value in e.metrics.items()}) for e in new)
        if not self.steps:
            return {}
        data, name = write_steps(self.steps), steps_name(attempt)
        store.put(name, [data])
        return {"steps": [name, digest_hex(data)]}

    def committed(self, listeners: Listeners) -> None:
        """Tell the listeners of the steps that the commit has added."""
        if self.steps:
            listeners.measured(self.steps)
