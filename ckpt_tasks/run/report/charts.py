"""The data of a run's charts as JSON: curves thinned without losing spikes, marks, and where the time went.

A curve is a series of values by step, and by seconds since the run began. If training went back to
an older checkpoint, the run has a final line and abandoned stretches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tasks.format.layout.steps import StepMetrics
from ckpt_tasks.run.ledger.curve import Curve
from ckpt_tasks.run.ledger.goodput import Course
from ckpt_tasks.run.ledger.live_steps import LiveStep
from ckpt_tasks.run.ledger.timeline import Moment
from ckpt_tasks.run.report.picture import sort_metrics, strip_of

_MOST_LEFT = 20  # Draw at most this many abandoned stretches.
_MOST_MARKS, _MOST_COMMITS = 300, 150
_MARKED = ("failure", "lost", "taken", "fallback", "rollback")
_DIGITS = 7
_COLUMNS = 300  # Divide the strip that shows where the time went into this many equal parts.

_Floats = npt.NDArray[np.float64]


class Curves:
    """The values of each metric of a run, by name (suite/metric for evaluations); `add` appends newer history.

    Each array has a column for each value, in the order of their commits; its rows are the number of the commit, the
    step, the time in seconds since 1970, and the value.
    """

    def __init__(self) -> None:
        self.by_metric: dict[str, _Floats] = {}
        self.newest_n = -1

    @property
    def size_bytes(self) -> int:
        """The size in bytes of all values of the curves."""
        return sum(values.nbytes for values in self.by_metric.values())

    def add(self, moments: Iterable[Moment], tables: Mapping[int, Sequence[StepMetrics] | None]) -> None:
        """Add the commits and evaluations newer than `newest_n`; `tables` maps the number of a commit to its steps.

        A commit without a table adds one value of each of its metrics.
        """
        new: dict[str, list[tuple[int, int, float, float]]] = {}
        for one in moments:
            if one.n <= self.newest_n or one.step is None or one.kind not in ("commit", "evaluation"):
                continue
            self.newest_n = one.n
            prefix = f"{one.text}/" if one.kind == "evaluation" else ""
            for step, at_s, metrics in tables.get(one.n) or [
                StepMetrics(one.step, one.at_s - one.flush_s, one.metrics)
            ]:
                for name, value in metrics.items():
                    new.setdefault(prefix + name, []).append((one.n, step, at_s, value))
        for name, values in new.items():
            before = self.by_metric.get(name, np.empty((4, 0)))
            self.by_metric[name] = np.concatenate([before, np.array(values, np.float64).T], axis=1)

    def line(
        self, name: str, course: Course, *, by: str, low: float, high: float, most: int
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the final line and the abandoned stretches of a metric, from `low` to `high` on the axis `by`.

        `by` is "step" or "time". The line and each stretch are thinned to about `most` values.
        """
        number, step, at_s, value = self.by_metric.get(name, np.empty((4, 0)))
        elapsed_s = at_s - began_s(course)
        along = elapsed_s if by == "time" else step
        within = (along >= low) & (along <= high)
        # `course.line` has no evaluations, but keep their values: they measure checkpoints.
        stays = np.isin(number, [*course.line, *(place.moment.n for place in course.of("evaluation"))])
        went_back = np.flatnonzero(np.diff(step) < 0) + 1

        def thinned(places: npt.NDArray[np.intp]) -> dict[str, Any]:
            return thin(step[places], elapsed_s[places], value[places], most)

        left = [part[~stays[part] & within[part]] for part in np.split(np.arange(len(step)), went_back)]
        left = [part for part in left if len(part)][-_MOST_LEFT:]
        return thinned(np.flatnonzero(stays & within)), [thinned(part) for part in left]


def curves_of(course: Course, curve: Curve) -> Curves:
    """Return the curves of a run from all of its steps."""
    tables: dict[int, list[StepMetrics]] = {}
    for one in curve.steps:
        tables.setdefault(one.n, []).append(StepMetrics(one.step, one.at_s, one.metrics))
    curves = Curves()
    curves.add([place.moment for place in course.placed], tables)
    return curves


def chart_data(
    curves: Curves,
    course: Course,
    names: Iterable[str] | None = None,
    *,
    by: str = "step",
    low: float = -math.inf,
    high: float = math.inf,
    most: int = 1_000,
) -> dict[str, Any]:
    """Return the data for a run's charts: the lines of `names` (None: of all metrics), and the run's course in time."""
    known = sort_metrics(curves.by_metric)
    lines = {}
    for name in known if names is None else (name for name in names if name in curves.by_metric):
        line, left = curves.line(name, course, by=by, low=low, high=high, most=most)
        lines[name] = {"line": line, "left": left}
    commits = [round(place.elapsed_s, 1) for place in course.of("commit")]
    return {
        "metrics": known,
        "lines": lines,
        "marks": marks_of(course),
        "commits": commits[:: 1 + len(commits) // _MOST_COMMITS],
        "strip": strip_of(course, _COLUMNS),
        "wall_s": course.wall_s,
    }


def add_live(
    lines: dict[str, Any],
    names: Iterable[str],
    steps: Sequence[LiveStep],
    course: Course,
    *,
    by: str,
    low: float,
    high: float,
) -> None:
    """Add the steps that are not committed yet to a chart's `lines`, as a stretch beside the final line (dashed)."""
    for name in names:
        had = [(one.step, one.at_s - began_s(course), one.metrics[name]) for one in steps if name in one.metrics]
        values = [one for one in had if low <= (one[1] if by == "time" else one[0]) <= high]
        if values:
            none, (step, elapsed_s, value) = np.empty(0), np.array(values, np.float64).T
            line = lines.setdefault(name, {"line": thin(none, none, none, 1), "left": []})
            line["left"].append(thin(step, elapsed_s, value, len(values)))


def began_s(course: Course) -> float:
    """Return when a run began, in seconds since 1970, or 0 if its course has no moments."""
    return course.placed[0].moment.at_s if course.placed else 0.0


def thin(step: _Floats, elapsed_s: _Floats, value: _Floats, most: int) -> dict[str, Any]:
    """Return values as JSON data; more than `most` values are thinned to the lowest and the highest of each bucket.

    A value that is not finite becomes None. Thinned data also has `mean`: the mean of each bucket, at the middle of the
    bucket; its item `each` is the average number of values in a bucket.
    """
    finite = np.isfinite(value)
    if len(value) <= most:
        return {"step": _whole(step), "at_s": _rounded(elapsed_s), "value": _rounded(value)}
    low, high = np.where(finite, value, math.inf), np.where(finite, value, -math.inf)
    edges = np.linspace(0, len(value), max(1, most // 2) + 1).astype(int)
    kept, middles, means = {0, len(value) - 1}, list[int](), list[float]()
    for begin, end in pairwise(edges.tolist()):
        good = finite[begin:end]
        kept |= {begin + int(low[begin:end].argmin()), begin + int(high[begin:end].argmax())}
        if not good.all():
            kept.add(begin + int(good.argmin()))  # Keep the first value that is not finite.
        middles.append((begin + end) // 2)
        means.append(float(value[begin:end][good].mean()) if good.any() else math.nan)
    places = sorted(kept)
    mean = {"step": _whole(step[middles]), "at_s": _rounded(elapsed_s[middles]), "value": _rounded(np.array(means))}
    return {
        "step": _whole(step[places]),
        "at_s": _rounded(elapsed_s[places]),
        "value": _rounded(value[places]),
        "mean": {**mean, "each": len(value) / len(means)},
    }


def marks_of(course: Course) -> list[dict[str, Any]]:
    """Return the newest failures, deaths, resumes and rollbacks, with the step that training had reached.

    `again` is the first and the last step that was trained again afterwards.
    """
    marks: list[dict[str, Any]] = []
    step, committed_s = 0, 0.0
    first = course.of("taken", "lost")[:1]
    for place in course.placed:
        moment = place.moment
        if moment.kind == "commit" and moment.step is not None:
            step = moment.step
            if moment.n in course.redone and marks and marks[-1]["at_s"] >= committed_s:
                marks[-1]["again"] = course.redone[moment.n]
            committed_s = round(place.elapsed_s, 3)
        elif moment.kind in _MARKED and place not in first:
            at_s = round(place.elapsed_s, 3)
            marks.append({"kind": moment.kind, "step": step, "at_s": at_s, "text": moment.text})
    return marks[-_MOST_MARKS:]


def _whole(values: _Floats) -> list[int]:
    return [int(value) for value in values]


def _rounded(values: _Floats) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]
