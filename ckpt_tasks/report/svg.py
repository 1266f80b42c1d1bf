"""SVG without a library: texts, lines, and round numbers for axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

INK, PALE = "#333333", "#777777"
FONTS = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
_MOST_TICKS = 50


def text(
    at_x: float,
    at_y: float,
    words: str,
    *,
    anchor: str = "start",
    fill: str = INK,
    size: int = 13,
    weight: str = "",
    css: str = "",
) -> str:
    """Write a text; a style rule for the class `css` overrides `fill`."""
    more = (f' font-weight="{weight}"' if weight else "") + (f' class="{css}"' if css else "")
    return (
        f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}"{more}>'
        f"{escape(words)}</text>"
    )


def polyline(places: Iterable[tuple[float, float]], colour: str, width: float, css: str = "") -> str:
    """Draw a line through points, clipped to the path "frame"."""
    path = " ".join(f"{at_x:.1f},{at_y:.1f}" for at_x, at_y in places)
    more = f' class="{css}"' if css else ""
    look = f'clip-path="url(#frame)" fill="none" stroke="{colour}" stroke-width="{width}"{more}'
    return f'<polyline points="{path}" {look}/>'


def round_ticks(lowest: float, highest: float) -> list[float]:
    """Return four to eight round numbers from `lowest` to `highest`, which must be above it."""
    rough = (highest - lowest) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.7)
    first = math.ceil(lowest / step)
    return [n * step for n in range(first, min(math.floor(highest / step), first + _MOST_TICKS) + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Write round numbers with enough digits to show their distance, at least four."""
    near = (ticks[1] - ticks[0]) / 10 if len(ticks) > 1 else math.inf
    digits = 4
    while digits < 17 and any(abs(float(f"{value:.{digits}g}") - value) > near for value in ticks):
        digits += 1
    return [f"{value:.{digits}g}" for value in ticks]
