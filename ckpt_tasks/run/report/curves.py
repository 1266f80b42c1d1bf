"""The metrics of every step as one SVG: one small picture per metric; abandoned lines are pale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from ckpt_tasks.run.ledger.curve import Curve
from ckpt_tasks.run.report.picture import sort_metrics
from ckpt_tasks.run.report.svg import MOST_VALUE, PALE, document, ends_of, round_ticks, svg_text, thinned, tick_labels
from ckpt_tasks.run.report.words import count, number, printable

_COLUMNS, _WIDTH, _HEIGHT = 3, 300, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 290, 34, 156  # The positions of one picture's axes.
_MOST = 12
_TITLE_SHOWN = 36  # The number of characters above one picture.
_STYLE = """
.ckc-back{fill:#ffffff}.ckc-grid{stroke:#e6e6e6}.ckc-line{stroke:#1f4e79}.ckc-left{stroke:#d1495b;opacity:.45}
.ckc-axis{stroke:#888888}
@media (prefers-color-scheme:dark){.ckc-back{fill:#1c1d20}.ckc-grid{stroke:#34363b}.ckc-line{stroke:#7fb4ea}
.ckc-left{stroke:#f0705f}.ckc-ink{fill:#e4e4e7}.ckc-pale{fill:#a1a1aa}}
"""


class _Span(NamedTuple):
    low: float
    high: float

    def part(self, value: float) -> float:
        """Return the position of a value between the two ends: 0 at `low`, 1 at `high`."""
        return (value - self.low) / (self.high - self.low)


def draw_curves(curve: Curve, *, heading: str) -> str:
    """Draw a run's metrics and return the SVG document; "" if no step has metrics."""
    names = sort_metrics({name for point in curve.steps for name in point.metrics})
    shown = names[:_MOST]
    if not shown:
        return ""
    rows = math.ceil(len(shown) / _COLUMNS)
    width, height = _COLUMNS * _WIDTH, rows * _HEIGHT + (24 if len(names) > _MOST else 0)
    parts: list[str] = []
    steps = [point.step for point in curve.steps]
    along = _Span(min(steps), max(*steps, min(steps) + 1))
    for n, name in enumerate(shown):
        parts.append(f'<g transform="translate({n % _COLUMNS * _WIDTH} {n // _COLUMNS * _HEIGHT})">')
        parts += _picture(curve, name, along)
        parts.append("</g>")
    if len(names) > _MOST:
        more = f"and {count(len(names) - _MOST, 'more metric')}: Run.curve() has all"
        parts.append(svg_text(_LEFT, height - 8, more, size=12, css="ckc-pale", fill=PALE))
    return document((width, height), printable(heading)[:80], parts, style=_STYLE, back="ckc-back")


def _picture(curve: Curve, name: str, along: _Span) -> Iterator[str]:
    lines: dict[tuple[bool, int], list[tuple[int, float]]] = {}
    run = 0
    for before, point in zip((None, *curve.steps), curve.steps, strict=False):
        # A new line begins where training went back, and where an abandoned stretch begins or ends.
        run += before is not None and (point.step <= before.step or point.abandoned != before.abandoned)
        value = point.metrics.get(name)
        if value is not None and abs(value) <= MOST_VALUE:  # This also drops NaN.
            lines.setdefault((point.abandoned, run), []).append((point.step, value))
    values = [value for line in lines.values() for _, value in line]
    up = _Span(*ends_of(values))
    ticks = round_ticks(*up)
    for value, label in zip(ticks, tick_labels(ticks), strict=True):
        y = _BOTTOM - (_BOTTOM - _TOP) * up.part(value)
        yield f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" class="ckc-grid" stroke="#e6e6e6"/>'
        yield svg_text(_LEFT - 6, y + 4, label, anchor="end", size=11, css="ckc-pale", fill=PALE)
    for at_x, step, anchor in ((_LEFT, along.low, "start"), (_RIGHT, along.high, "end")):
        yield svg_text(at_x, _BOTTOM + 16, f"{step:,.0f}", anchor=anchor, size=11, css="ckc-pale", fill=PALE)
    yield svg_text((_LEFT + _RIGHT) / 2, _BOTTOM + 16, "step", anchor="middle", size=11, css="ckc-pale", fill=PALE)
    last = f": {number(values[-1])}" if values else ""
    yield svg_text(
        _LEFT, _TOP - 12, _shortened(printable(name), _TITLE_SHOWN - len(last)) + last, size=12, css="ckc-ink"
    )
    for (abandoned, _), line in sorted(lines.items(), reverse=True):  # Draw the final line last, on top.
        css, colour = ("ckc-left", "#d1495b") if abandoned else ("ckc-line", "#1f4e79")
        yield _line([(along.part(step), up.part(value)) for step, value in line], css, colour)
    yield f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" class="ckc-axis" stroke="#888888"/>'


def _shortened(name: str, length: int) -> str:
    """Shorten a name to `length` characters; keep its end, since names of similar metrics differ near the end."""
    return name if len(name) <= length else "…" + name[1 - length :]


def _line(places: Sequence[tuple[float, float]], css: str, colour: str) -> str:
    """Draw a line, thinned to the first, lowest, highest and last value of every pixel."""
    kept = thinned(places, lambda place: int(place[0] * (_RIGHT - _LEFT)), itemgetter(1))
    at = [(_LEFT + (_RIGHT - _LEFT) * x, _BOTTOM - (_BOTTOM - _TOP) * y) for x, y in kept]
    if len(at) == 1:
        return f'<circle cx="{at[0][0]:.1f}" cy="{at[0][1]:.1f}" r="2" fill="{colour}"/>'
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    return f'<polyline points="{points}" fill="none" class="{css}" stroke="{colour}" stroke-width="1.5"/>'
