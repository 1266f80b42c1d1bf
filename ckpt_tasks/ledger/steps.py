"""The metrics of every step: kept from commit to commit, put into the run with each one, and read as one curve.

A commit's table holds the steps that its checkpoint adds to its parent's. The entry's event names it. So what is
read is exactly what was committed: a step that was trained, lost and trained again has the metrics of the training that
counts, and those of a line that was left are marked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_tasks.errors import IntegrityError, ObjectNotFoundError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import Attempt, steps_name
from ckpt_tasks.format.steps import MAX_STEPS_BYTES, StepMetrics, read_steps, write_steps
from ckpt_tasks.ledger.curve import Curve, CurveStep
from ckpt_tasks.ledger.goodput import Course
from ckpt_tasks.ledger.history import History
from ckpt_tasks.ledger.metrics import held
from ckpt_tasks.ledger.timeline import Moment
from ckpt_tasks.state.processes import in_threads
from ckpt_tasks.storage.port import ReadableStore, Store

__all__ = ["StepLog", "put_steps", "read_curve", "read_steps_file", "steps_file"]

_MOST_KEPT = 1 << 18  # steps without a commit; then every second one goes
_AT_ONCE = 16  # requests to a store that is far away


class StepLog:
    """The metrics of the steps that are not known to be committed, in the order in which they were reported."""

    def __init__(self, most: int = _MOST_KEPT) -> None:
        self._most = most
        self._steps: list[StepMetrics] = []

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep what a step reported, beside what it reported before; a tensor on a device is not waited for."""
        if not metrics:
            return
        if self._steps and self._steps[-1].step == step:
            metrics = {**self._steps.pop().metrics, **metrics}
        if len(self._steps) >= self._most:
            del self._steps[::2]
        self._steps.append(StepMetrics(step, time.time(), held(metrics)))

    def since(self, step: int) -> tuple[StepMetrics, ...]:
        """Return the steps after one that is committed, and forget the others."""
        if self._steps and self._steps[0].step <= step:
            self._steps = [one for one in self._steps if one.step > step]
        return tuple(self._steps)

    def restored(self, steps: Sequence[StepMetrics] = ()) -> None:
        """Go on from a checkpoint, or from a snapshot with the `steps` that no commit has brought yet."""
        self._steps = [*steps]


def put_steps(
    store: Store, attempt: Attempt, steps: tuple[StepMetrics, ...], after: int
) -> tuple[tuple[StepMetrics, ...], list[str]]:
    """Put the steps after the parent's; return them, and the name and the digest of their table (of none: nothing)."""
    new = tuple(_numbers(one for one in steps if one.step > after))
    if not new:
        return (), []
    data = write_steps(new)
    name = steps_name(attempt)
    store.put(name, [data])
    return new, [name, digest_hex(data)]


def steps_file(steps: tuple[StepMetrics, ...]) -> bytes:
    """Write steps as the bytes of a file with its own digest, for a snapshot that outlives its process."""
    data = write_steps(_numbers(steps))
    return bytes.fromhex(digest_hex(data)) + data


def read_steps_file(store: ReadableStore, name: str) -> tuple[StepMetrics, ...]:
    """Read what `steps_file` wrote; no steps where it is not there or damaged: they are for people."""
    try:
        data = store.get(name, MAX_STEPS_BYTES)
        return tuple(read_steps(data[16:], digest=data[:16].hex(), name=name))
    except (IntegrityError, ObjectNotFoundError):
        return ()


def _numbers(steps: Iterable[StepMetrics]) -> Iterator[StepMetrics]:
    """Read what lies on a device, which waits for it."""
    for step, at_s, metrics in steps:
        yield StepMetrics(step, at_s, {name: float(value) for name, value in metrics.items()})


def read_curve(history: History, course: Course, known: dict[str, list[StepMetrics] | None] | None = None) -> Curve:
    """Read the metrics of every step that a course's commits brought; `known` keeps tables for the next reading.

    Raises StoreError if the store fails.
    """
    tables = {} if known is None else known
    commits = [one.moment for one in course.of("commit") if one.moment.steps is not None]
    new = [one for one in commits if one.steps is not None and one.steps[0] not in tables]
    read = [*_read(history, new)]
    tables.update({one.steps[0]: steps for one, steps in zip(new, read, strict=True) if one.steps})
    found, damaged = list[CurveStep](), 0
    for one in commits:
        assert one.steps is not None
        steps = tables[one.steps[0]]
        damaged += steps is None
        found += [CurveStep(one.n, s.step, s.at_s, s.metrics, one.n not in course.line) for s in steps or ()]
    return Curve(tuple(found), damaged)


def _read(history: History, commits: list[Moment]) -> Iterator[list[StepMetrics] | None]:
    def read(one: Moment) -> list[StepMetrics] | None:
        assert one.steps is not None
        name, digest = one.steps
        try:
            return read_steps(history.store.get(name, MAX_STEPS_BYTES), digest=digest, name=name)
        except (IntegrityError, ObjectNotFoundError):
            return None  # `verify` reports it

    if history.store.near:
        yield from map(read, commits)
    else:
        yield from in_threads(read, commits, _AT_ONCE, "ckpt-steps")
