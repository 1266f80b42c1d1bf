"""An SVG picture of the cost of saving, for each interval between saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from ckpt_tasks.policy.cadence import TradeOff
from ckpt_tasks.report.svg import INK, PALE, document, polyline, round_ticks, text
from ckpt_tasks.report.words import fine_span, percent

_WIDTH, _HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 830, 84, 410  # The positions of the axes.
_WAITING, _AGAIN, _TOGETHER = "#c77700", "#c0392b", "#1f4e79"
_SHOWN = 4.5  # The picture's top is this multiple of the cost of the recommended interval.
_TICKS_S = (
    *(m * 10.0**e for e in range(-4, 2) for m in (1, 3)),
    *(60.0, 180.0, 600.0, 1_800.0, 7_200.0, 21_600.0, 64_800.0),
    *(86_400.0 * m * 10**e for e in range(6) for m in (2, 6)),
)

Scale = Callable[[float], float]


def draw_curve(points: Sequence[TradeOff], recommended: TradeOff, least_s: float, *, heading: str, about: str) -> str:
    """Draw the curve and return the SVG document; intervals below `least_s`, which are not allowed, are shaded."""
    highest = min(1.0, _SHOWN * recommended.total) or 0.01
    first_s, last_s = points[0].interval_s, points[-1].interval_s

    def x(interval_s: float) -> float:
        part = math.log(max(interval_s, first_s) / first_s) / math.log(last_s / first_s)
        return _LEFT + (_RIGHT - _LEFT) * min(1.0, part)

    def y(share: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * share / highest  # Points above the frame are clipped.

    curves = [
        ("waiting for saves", _WAITING, 2, [(x(p.interval_s), y(p.overhead)) for p in points]),
        ("doing lost work again", _AGAIN, 2, [(x(p.interval_s), y(p.expected_loss)) for p in points]),
        ("together", _TOGETHER, 3, [(x(p.interval_s), y(p.total)) for p in points]),
    ]
    frame = f'x="{_LEFT}" y="{_TOP}" width="{_RIGHT - _LEFT}" height="{_BOTTOM - _TOP}"'
    parts = [
        text(_LEFT, 30, heading, size=17, weight="bold"),
        text(_LEFT, 50, about, fill=PALE),
        *_forbidden(x(least_s) if least_s > first_s else _LEFT),
        *_grid(x, y, highest, (first_s, last_s)),
        f'<clipPath id="frame"><rect {frame}/></clipPath>',
        *(polyline(places, colour, width) for _, colour, width, places in curves),
        *_mark(x(recommended.interval_s), y(recommended.total), recommended),
        *_legend([(name, colour, width) for name, colour, width, _ in curves]),
    ]
    return document((_WIDTH, _HEIGHT), heading, parts)


def _grid(x: Scale, y: Scale, highest: float, ends_s: tuple[float, float]) -> Iterable[str]:
    for share in round_ticks(0.0, highest):
        at = y(share)
        yield f'<path d="M{_LEFT} {at:.1f}H{_RIGHT}" stroke="#e4e4e4"/>'
        yield text(_LEFT - 10, at + 4, f"{100 * share:.4g} %", anchor="end")
    for tick_s in (tick_s for tick_s in _TICKS_S if ends_s[0] <= tick_s <= ends_s[1]):
        at = x(tick_s)
        yield f'<path d="M{at:.1f} {_BOTTOM}v6" stroke="{INK}"/>'
        yield text(at, _BOTTOM + 23, _tick(tick_s), anchor="middle")
    yield f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="{INK}"/>'
    yield text((_LEFT + _RIGHT) / 2, _BOTTOM + 52, "training between two saves", anchor="middle")
    yield text(_LEFT, _TOP - 12, "part of all time", fill=PALE)


def _forbidden(until: float) -> Iterable[str]:
    if until > _LEFT:
        yield f'<rect x="{_LEFT}" y="{_TOP}" width="{until - _LEFT:.1f}" height="{_BOTTOM - _TOP}" fill="#f1f1f1"/>'
    if until > _LEFT + 220:
        for line, words in enumerate(("shorter than a flush", "or over the cap")):
            yield text(until - 10, _TOP + 18 + 16 * line, words, anchor="end", fill=PALE, size=12)


def _mark(at_x: float, at_y: float, recommended: TradeOff) -> Iterable[str]:
    label = f"every {fine_span(recommended.interval_s)}: {percent(recommended.total)}"
    side, anchor = (10, "start") if at_x < _RIGHT - 180 else (-10, "end")
    yield f'<path d="M{at_x:.1f} {_TOP}V{_BOTTOM}" stroke="{_TOGETHER}" stroke-dasharray="4 4"/>'
    yield f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="5" fill="{_TOGETHER}"/>'
    yield text(at_x + side, _TOP + 18, label, anchor=anchor, fill=_TOGETHER, weight="bold")


def _legend(curves: Iterable[tuple[str, str, int]]) -> Iterable[str]:
    place = _RIGHT - 460
    for name, colour, width in curves:
        yield f'<path d="M{place} 68h22" stroke="{colour}" stroke-width="{width}"/>'
        yield text(place + 28, 72, name)
        place += 50 + round(7.2 * len(name))


def _tick(seconds: float) -> str:
    return fine_span(seconds).replace(".0 ", " ")
