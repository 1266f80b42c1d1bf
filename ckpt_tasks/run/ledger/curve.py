"""The curve of a run: the metrics of every step, read from the tables that its commits name.

Reading the tables needs no torch; drawing a curve needs no Arrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tasks.errors import IntegrityError, ObjectNotFoundError
from ckpt_tasks.format.keys import STEPS_NAME
from ckpt_tasks.process import in_threads
from ckpt_tasks.run.ledger.goodput import Course
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.timeline import Moment
from ckpt_tasks.storage.port import ReadableStore

if TYPE_CHECKING:
    from ckpt_tasks.format.layout.steps import StepMetrics

_AT_ONCE = 16  # A remote store gets at most this many requests at once.


@dataclass(frozen=True)
class CurveStep:
    """One step of a run's curve, committed by ledger entry `n`; `abandoned`: training went back to an earlier step."""

    n: int
    step: int
    at_s: float
    metrics: Mapping[str, float]
    abandoned: bool


@dataclass(frozen=True)
class Curve:
    """The metrics of a run's steps, in the order of their commits; `damaged` counts tables that could not be read."""

    steps: tuple[CurveStep, ...] = ()
    damaged: int = 0


def read_curve(history: History, course: Course, known: dict[str, list[StepMetrics] | None] | None = None) -> Curve:
    """Read the metrics of every step that a course's commits added; `known` caches tables for the next call.

    Raises StoreError if the store fails.
    """
    tables = {} if known is None else known
    commits = [commit.moment for commit in course.of("commit") if commit.moment.steps is not None]
    new = [commit for commit in commits if commit.steps is not None and commit.steps[0] not in tables]
    read = zip(new, read_tables(history, new), strict=True)
    tables.update({commit.steps[0]: steps for commit, steps in read if commit.steps})
    points, damaged = list[CurveStep](), 0
    for commit in commits:
        assert commit.steps is not None
        steps = tables[commit.steps[0]]
        damaged += steps is None
        points += [CurveStep(commit.n, s.step, s.at_s, s.metrics, commit.n not in course.line) for s in steps or ()]
    return Curve(tuple(points), damaged)


def read_tables(history: History, commits: Sequence[Moment]) -> list[list[StepMetrics] | None]:
    """Read the tables of steps that commits name, one for each; None for a table that is missing or damaged."""
    from ckpt_tasks.format.layout.steps import MAX_STEPS_BYTES, read_steps

    def read(one: Moment) -> list[StepMetrics] | None:
        assert one.steps is not None
        name, digest = one.steps
        try:
            return read_steps(history.store.get(name, MAX_STEPS_BYTES), digest=digest, name=name)
        except (IntegrityError, ObjectNotFoundError):
            return None  # `ckpt verify` reports such a table.

    return in_threads(read, commits, 1 if history.store.near else _AT_ONCE, "ckpt-steps")


def read_steps_file(snapshot: ReadableStore) -> Sequence[StepMetrics]:
    """Read the steps of a snapshot in memory; return () if they are missing or damaged: metrics are for people."""
    from ckpt_tasks.format.layout.steps import MAX_STEPS_BYTES, read_steps

    try:
        data = snapshot.get(STEPS_NAME, MAX_STEPS_BYTES)
        return read_steps(data[16:], digest=data[:16].hex(), name=STEPS_NAME)
    except (IntegrityError, ObjectNotFoundError):
        return ()
