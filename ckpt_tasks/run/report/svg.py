"""SVG without a library: texts, lines, and round numbers for axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TypeVar

INK, PALE = "#333333", "#777777"
FONTS = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
MOST_VALUE = 1e300  # The difference of two larger values could be infinite.
_MOST_TICKS = 50

_P = TypeVar("_P")


def document(size: tuple[int, int], title: str, parts: Iterable[str], *, style: str = "", back: str = "") -> str:
    """Return a document with a white background; a rule of `style` for the class `back` overrides this colour."""
    width, height = size
    css, rules = f'class="{back}" ' if back else "", f"<style>{style}</style>" if style else ""
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="{FONTS}">',
        f"<title>{escape(title)}</title>{rules}",
        f'<rect {css}width="{width}" height="{height}" fill="#ffffff"/>',
        *parts,
        "</svg>",
    )
    return "\n".join(lines) + "\n"


def svg_text(
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


def thinned(points: Sequence[_P], pixel: Callable[[_P], int], value: Callable[[_P], float]) -> list[_P]:
    """Return the first, lowest, highest and last point of each pixel."""
    by_pixel: dict[int, list[_P]] = {}
    for point in points:
        by_pixel.setdefault(pixel(point), []).append(point)
    kept = {
        id(point)
        for here in by_pixel.values()
        for point in (here[0], min(here, key=value), max(here, key=value), here[-1])
    }
    return [point for point in points if id(point) in kept]


def ends_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the two ends of an axis for these values, with a small margin below and above."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - room, high + room


def round_ticks(lowest: float, highest: float) -> list[float]:
    """Return four to eight round numbers from `lowest` to `highest`; `highest` must be above `lowest`."""
    rough = (highest - lowest) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.7)
    first = math.ceil(lowest / step)
    return [n * step for n in range(first, min(math.floor(highest / step), first + _MOST_TICKS) + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Write round numbers with four digits, or with more if their distance needs more."""
    near = (ticks[1] - ticks[0]) / 10 if len(ticks) > 1 else math.inf
    digits = 4
    while digits < 17 and any(abs(float(f"{value:.{digits}g}") - value) > near for value in ticks):
        digits += 1
    return [f"{value:.{digits}g}" for value in ticks]
