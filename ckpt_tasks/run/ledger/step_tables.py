"""The metrics of every step: collected between commits and written with each commit; `curve.py` reads them.

A commit's table holds the steps that its checkpoint adds to its parent's; the entry's event names the table. So the
curve shows committed steps only: a step that was trained, lost and trained again has the metrics of its last training,
and steps of abandoned lines are marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_tasks.errors import IntegrityError, ObjectNotFoundError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import Attempt, steps_name
from ckpt_tasks.format.layout.steps import MAX_STEPS_BYTES, StepMetrics, read_steps, write_steps
from ckpt_tasks.run.ledger.metrics import held
from ckpt_tasks.storage.port import ReadableStore, Store
from ckpt_tasks.system import system

_MOST_KEPT = 1 << 18  # Above this many uncommitted steps every second one is dropped.


class StepLog:
    """The metrics of the steps that are not known to be committed, in the order of their reports."""

    def __init__(self, most: int = _MOST_KEPT) -> None:
        self._most = most
        self._steps: list[StepMetrics] = []

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics of a step to its earlier metrics; do not wait for tensors on a device."""
        if not metrics:
            return
        if self._steps and self._steps[-1].step == step:
            metrics = {**self._steps.pop().metrics, **metrics}
        if len(self._steps) >= self._most:
            del self._steps[::2]
        self._steps.append(StepMetrics(step, system().time(), held(metrics)))

    def since(self, step: int) -> tuple[StepMetrics, ...]:
        """Return the steps after a committed `step`, and forget the earlier ones."""
        if self._steps and self._steps[0].step <= step:
            self._steps = [entry for entry in self._steps if entry.step > step]
        return tuple(self._steps)

    def restored(self, steps: Sequence[StepMetrics] = ()) -> None:
        """Start from a checkpoint, or from a snapshot in memory with its uncommitted `steps`."""
        self._steps = [*steps]


def put_steps(
    store: Store, attempt: Attempt, steps: tuple[StepMetrics, ...], after: int
) -> tuple[tuple[StepMetrics, ...], list[str]]:
    """Put the table of the steps after `after`; return these steps, and [name, digest] of the table ([] if empty)."""
    new = tuple(_numbers(entry for entry in steps if entry.step > after))
    if not new:
        return (), []
    data = write_steps(new)
    name = steps_name(attempt)
    store.put(name, [data])
    return new, [name, digest_hex(data)]


def read_steps_file(store: ReadableStore, name: str) -> tuple[StepMetrics, ...]:
    """Read a file of `steps_file`; return () if it is missing or damaged, since metrics are only for people."""
    try:
        data = store.get(name, MAX_STEPS_BYTES)
        return tuple(read_steps(data[16:], digest=data[:16].hex(), name=name))
    except (IntegrityError, ObjectNotFoundError):
        return ()


def _numbers(steps: Iterable[StepMetrics]) -> Iterator[StepMetrics]:
    """Turn tensors on a device into numbers; this waits for the device."""
    for step, at_s, metrics in steps:
        yield StepMetrics(step, at_s, {name: float(value) for name, value in metrics.items()})
