"""A run on one time line, as an SVG: loss and evaluations, commits, failures and resumes, and where the time went.

The picture follows the light or dark mode of the page that shows it, and loads nothing.
"""

from __future__ import annotations

import math
import re
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from ckpt_tasks.run.ledger.curve import Curve, CurveStep
from ckpt_tasks.run.ledger.goodput import SHARES, Course
from ckpt_tasks.run.report.svg import (
    INK,
    MOST_VALUE,
    PALE,
    document,
    ends_of,
    polyline,
    round_ticks,
    svg_text,
    thinned,
    tick_labels,
)
from ckpt_tasks.run.report.words import fine_span, number, percent, printable, utc

_WIDTH, _HEIGHT = 900, 372
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 884, 48, 252  # The positions of the axes.
_LEGEND = 22
_STRIP, _THICK = 260, 10  # The position and thickness of the strip, which shows where the time went, in order.
_SUMS = 328  # The position of the bar, which shows the sum of each share.
_NAME_SHOWN = 40
_MIN_SHOWN_PX = 0.5
_MOST_MARKS = 300
_TICKS_S = (
    *(m * 10.0**e for e in range(-3, 1) for m in (1, 2, 5)),
    *(10, 15, 30, 60, 120, 300, 600, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200, 86_400),
    *(86_400.0 * m * 10**e for e in range(7) for m in (2, 5, 10)),
)
_PAUSES = ("down", "idle")
_COLOURS = {
    "useful": "#2e9e6b",
    "lost": "#d1495b",
    "saving": "#d9a100",
    "starting": "#7d8ff0",
    "down": "#8b8f98",
    "idle": "#c9ccd3",
    "data": "#8f6bb3",
    "unattributed": "#5fb3c4",
}
_STYLE = """
.ckr-back{fill:#ffffff}.ckr-grid{stroke:#e6e6e6}.ckr-line{stroke:#1f4e79}.ckr-dot{fill:#1f4e79}.ckr-axis{stroke:#888888}
.ckr-down{fill:#9a9da5;opacity:.28}.ckr-idle{fill:#9a9da5;opacity:.12}.ckr-fail{stroke:#c0392b;fill:#c0392b}
.ckr-again{stroke:#2b6fd6;fill:#2b6fd6}.ckr-eval{fill:#c2410c;stroke:#ffffff}.ckr-tick{stroke:#2e7d55}
@media (prefers-color-scheme:dark){
.ckr-back{fill:#1c1d20}.ckr-grid{stroke:#34363b}.ckr-line{stroke:#7fb4ea}.ckr-dot{fill:#7fb4ea}.ckr-ink{fill:#e4e4e7}
.ckr-pale{fill:#a1a1aa}.ckr-fail{stroke:#f0705f;fill:#f0705f}.ckr-again{stroke:#74a7ff;fill:#74a7ff}
.ckr-eval{fill:#fb923c;stroke:#1c1d20}.ckr-tick{stroke:#5cc492}}
"""

Scale = Callable[[float], float]


class _Point(NamedTuple):
    """A value at a time on the time line, with the text of its tooltip."""

    elapsed_s: float
    value: float
    about: str


def draw_run(course: Course, *, heading: str, curve: Curve | None = None) -> str:
    """Draw a run's course, with every step of its curve, and return the SVG document."""
    name = main_metric([commit.moment.metrics for commit in course.of("commit")])
    losses, evaluations = _losses(course, name, curve or Curve()), _evaluations(course, name)
    wall_s = max(course.wall_s, 1e-3)
    low, high = ends_of([p.value for p in (*losses, *evaluations) if abs(p.value) <= MOST_VALUE])

    def x(elapsed_s: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * min(1.0, max(0.0, elapsed_s / wall_s))

    def y(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low)

    frame = f'x="{_LEFT}" y="{_TOP - 4}" width="{_RIGHT - _LEFT}" height="{_BOTTOM - _TOP + 8}"'
    parts = [
        *_bands(course, x),
        *_axes(course, x, y, (low, high) if losses or evaluations else None),
        *_axis_titles(name),
        f'<clipPath id="frame"><rect {frame}/></clipPath>',
        *_ticks(course, x),
        *_curve(losses, x, y, [(s.begin_s + s.end_s) / 2 for s in course.spans if s.kind in _PAUSES]),
        *_marks(course, x),
        *_points(evaluations, x, y),
        *_legend(name, course, bool(evaluations)),
        *_strip(course),
        *_sums(course),
    ]
    title = printable(heading)[: 2 * _NAME_SHOWN]
    return document((_WIDTH, _HEIGHT), title, parts, style=_STYLE, back="ckr-back")


def sort_metrics(names: Iterable[str]) -> list[str]:
    """Sort names of metrics by importance: the loss, other losses, then by name, layer2 before layer10."""

    def key(name: str) -> tuple[bool, bool, str, str]:
        natural = re.sub(r"[0-9]+", lambda digits: digits[0].zfill(20), name)
        return "loss" not in name, "entropy" not in name, natural, name

    return sorted(names, key=key)


def main_metric(metrics: Iterable[Mapping[str, float]]) -> str | None:
    """Choose the metric by which to draw a run; None if it has no metric."""
    return next(iter(sort_metrics({name for values in metrics for name in values})), None)


def strip_of(course: Course, columns: int) -> list[str]:
    """Divide the run's wall time into equal columns; return the name of the largest share in each column."""
    width_s = course.wall_s / columns
    if width_s <= 0:
        return []
    sums = [dict.fromkeys(SHARES, 0.0) for _ in range(columns)]
    for span in course.spans:
        for column in range(int(span.begin_s / width_s), min(columns, math.ceil(span.end_s / width_s))):
            inside_s = min(span.end_s, (column + 1) * width_s) - max(span.begin_s, column * width_s)
            sums[column][span.kind] += inside_s
    return [max(column, key=column.__getitem__) for column in sums]


def _losses(course: Course, name: str | None, curve: Curve) -> list[_Point]:
    """Return the values of the final line; omit abandoned values, which would be drawn over the line.

    A commit without a table of steps has one point.
    """
    if name is None:
        return []
    steps: dict[int, list[CurveStep]] = {}
    for step in curve.steps:
        if name in step.metrics:
            steps.setdefault(step.n, []).append(step)
    drawn = []
    for at_s, moment in ((p.elapsed_s, p.moment) for p in course.of("commit") if p.moment.n in course.line):
        taken_s = moment.at_s - moment.flush_s
        points = [
            (max(0.0, at_s - max(0.0, taken_s - s.at_s)), s.step, s.metrics[name]) for s in steps.get(moment.n, ())
        ]
        if not points and name in moment.metrics:
            points = [(at_s, moment.step or 0, moment.metrics[name])]
        drawn += [_Point(when_s, value, f"step {step}: {number(value)}") for when_s, step, value in points]
    return drawn


def _evaluations(course: Course, name: str | None) -> list[_Point]:
    """Return the evaluations' values that fit the scale of `name`: the same metric, or any loss if `name` is a loss."""
    values = []
    for at_s, moment in ((p.elapsed_s, p.moment) for p in course.of("evaluation")):
        fit = [n for n in sort_metrics(moment.metrics) if n == name or ("loss" in n and "loss" in (name or ""))]
        if fit:
            value = moment.metrics[fit[0]]
            values.append(_Point(at_s, value, f"step {moment.step}, {moment.text}: {fit[0]} {number(value)}"))
    return values


def _bands(course: Course, x: Scale) -> Iterator[str]:
    for span in course.spans:
        width = x(span.end_s) - x(span.begin_s)
        if span.kind in _PAUSES and width >= _MIN_SHOWN_PX:
            place = f'x="{x(span.begin_s):.1f}" y="{_TOP}" width="{width:.1f}" height="{_BOTTOM - _TOP}"'
            yield f'<rect {place} class="ckr-{span.kind}"/>'


def _axes(course: Course, x: Scale, y: Scale, ends: tuple[float, float] | None) -> Iterator[str]:
    ticks = round_ticks(*ends) if ends else []
    for value, label in zip(ticks, tick_labels(ticks), strict=True):
        yield f'<path d="M{_LEFT} {y(value):.1f}H{_RIGHT}" class="ckr-grid" stroke="#e6e6e6"/>'
        yield svg_text(_LEFT - 8, y(value) + 4, label, anchor="end", size=12, css="ckr-pale", fill=PALE)
    if ends is None:
        middle = (_LEFT + _RIGHT) / 2
        yield svg_text(middle, (_TOP + _BOTTOM) / 2, "no metrics", anchor="middle", css="ckr-pale", fill=PALE)
    every_s = next((tick_s for tick_s in _TICKS_S if course.wall_s / tick_s <= 8), _TICKS_S[-1])
    for n in range(min(8, int(course.wall_s / every_s)) + 1):
        label = fine_span(n * every_s).replace(".0 ", " ") if n else "0"
        yield svg_text(x(n * every_s), _STRIP + 26, label, anchor="middle", size=12, css="ckr-pale", fill=PALE)
    yield f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" class="ckr-axis" stroke="#888888"/>'


def _axis_titles(name: str | None) -> Iterator[str]:
    along, up = (_LEFT + _RIGHT) / 2, (_TOP + _BOTTOM) / 2
    yield svg_text(along, _STRIP + 44, "time since the start", anchor="middle", size=12, css="ckr-pale", fill=PALE)
    if name:
        title = svg_text(0, 0, printable(name)[:_NAME_SHOWN], anchor="middle", size=12, css="ckr-pale", fill=PALE)
        yield f'<g transform="translate(16 {up:.0f}) rotate(-90)">{title}</g>'


def _curve(points: Sequence[_Point], x: Scale, y: Scale, pauses: Sequence[float]) -> Iterator[str]:
    """Draw the curve, thinned to the lowest and highest value of every two pixels.

    The line breaks at a non-finite value and where no process trained. `pauses`: one time within each pause, in order.
    """
    stretch: list[_Point] = []
    for point in (*points, None):
        finite = point is not None and abs(point.value) <= MOST_VALUE
        if point is not None and finite and not (stretch and _lies_between(stretch[-1], point, pauses)):
            stretch.append(point)
            continue
        places = [(x(p.elapsed_s), y(p.value)) for p in _thinned(stretch, x)]
        if len(places) > 1:
            yield polyline(places, "#1f4e79", 2, "ckr-line")
        if len(points) <= _WIDTH // 8 or len(places) == 1:
            yield from (f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" class="ckr-dot"/>' for a, b in places)
        stretch = [point] if point is not None and finite else []
        if point is not None and not finite:
            yield _said(f'<path d="M{x(point.elapsed_s):.1f} {_TOP}v12" class="ckr-fail"/>', point.about)


def _lies_between(before: _Point, after: _Point, times: Sequence[float]) -> bool:
    return bisect(times, before.elapsed_s) < bisect(times, after.elapsed_s)


def _thinned(points: Sequence[_Point], x: Scale) -> list[_Point]:
    return thinned(points, lambda point: round(x(point.elapsed_s) / 2), lambda point: point.value)


def _ticks(course: Course, x: Scale) -> Iterator[str]:
    """Mark the commits on the axis, at most one per pixel."""
    places = sorted({round(x(commit.elapsed_s)) for commit in course.of("commit")})
    path = "".join(f"M{at_x} {_BOTTOM - 6}v6" for at_x in places)
    yield f'<path d="{path}" class="ckr-tick" stroke="#2e7d55" stroke-width="1.5"/>'


def _marks(course: Course, x: Scale) -> Iterator[str]:
    """Mark failures, deaths and resumes by vertical lines, at most one of a kind per pixel."""
    # If a death and a failure fall on one pixel, draw the failure: it tells more.
    failures = [*course.deaths, *course.of("failure")]
    for places, css, head in ((failures, "ckr-fail", "l-5 -8h10z"), (course.resumes, "ckr-again", "m-5 -8l5 -5l5 5z")):
        for at_x, place in {round(x(place.elapsed_s)): place for place in places[-_MOST_MARKS:]}.items():
            shape = f'<path d="M{at_x} {_TOP}V{_BOTTOM}" stroke-dasharray="3 3"/><path d="M{at_x} {_TOP}{head}"/>'
            yield _said(f'<g class="{css}">{shape}</g>', f"{place.moment.kind}: {place.moment.text[: _NAME_SHOWN * 2]}")


def _points(points: Sequence[_Point], x: Scale, y: Scale) -> Iterator[str]:
    for point in _thinned([p for p in points if abs(p.value) <= MOST_VALUE], x):
        shape = f"M{x(point.elapsed_s):.1f} {y(point.value) - 6:.1f}l6 6l-6 6l-6 -6z"
        yield _said(f'<path d="{shape}" class="ckr-eval"/>', point.about)


def _said(shape: str, about: str) -> str:
    return f"<g><title>{escape(printable(about))}</title>{shape}</g>"


def _legend(name: str | None, course: Course, evaluated: bool) -> Iterator[str]:
    failed = bool(course.of("failure") or course.deaths)
    entries = [
        (bool(name), "M0 -4h18", "ckr-line", printable(name or "")[:_NAME_SHOWN]),
        (evaluated, "M9 -10l6 6l-6 6l-6 -6z", "ckr-eval", "evaluation"),
        (True, "M9 -8v8", "ckr-tick", "commit"),
        (failed, "M9 0l-5 -8h10z", "ckr-fail", "failure"),
        (bool(course.resumes), "M4 -1l5 -6l5 6z", "ckr-again", "resumed"),
    ]
    at_x = float(_LEFT)
    for shown, shape, css, words in entries:
        if shown:
            yield f'<path d="{shape}" transform="translate({at_x:.0f} {_LEGEND})" class="{css}" stroke-width="2"/>'
            yield svg_text(at_x + 24, _LEGEND, words, size=12, css="ckr-ink")
            at_x += 46 + 6.8 * len(words)
    first = next(iter(course.of("taken", "lost")), None)
    if first is not None:
        yield svg_text(
            _RIGHT, _LEGEND, f"from {utc(first.moment.at_s)} UTC", anchor="end", size=12, css="ckr-pale", fill=PALE
        )


def _strip(course: Course) -> Iterator[str]:
    """Draw a strip of where the time went: each pixel has the colour of its largest share."""
    begin = _LEFT
    for kind, columns in groupby(strip_of(course, _RIGHT - _LEFT)):
        width = len([*columns])
        yield f'<rect x="{begin}" y="{_STRIP}" width="{width}" height="{_THICK}" fill="{_COLOURS[kind]}"/>'
        begin += width


def _sums(course: Course) -> Iterator[str]:
    """Draw one bar of the whole wall time, divided into shares, with their names below."""
    at_x, label_x = float(_LEFT), float(_LEFT)
    yield svg_text(_LEFT - 8, _SUMS + 12, "in all", anchor="end", size=12, css="ckr-pale", fill=PALE)
    for kind in SHARES:
        seconds = course.seconds[kind]
        if seconds <= 0 or course.wall_s <= 0:
            continue
        width = (_RIGHT - _LEFT) * seconds / course.wall_s
        yield f'<rect x="{at_x:.1f}" y="{_SUMS}" width="{width:.1f}" height="16" fill="{_COLOURS[kind]}"/>'
        at_x += width
        words = f"{kind} {percent(seconds / course.wall_s)}"
        yield f'<rect x="{label_x:.1f}" y="{_SUMS + 26}" width="10" height="10" fill="{_COLOURS[kind]}"/>'
        yield svg_text(label_x + 15, _SUMS + 35, words, size=12, css="ckr-ink", fill=INK)
        label_x += 32 + 6.4 * len(words)
