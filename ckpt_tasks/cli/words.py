"""Numbers as people read them: sizes, ages, durations, metrics."""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["age", "count", "number", "size", "span", "when"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def size(size_bytes: float) -> str:
    """Write a size: 512 B, 12.3 MiB."""
    power = 0
    while size_bytes >= 1023.95 and power < len(_UNITS) - 1:
        size_bytes, power = size_bytes / 1024, power + 1
    return f"{size_bytes:.0f} B" if power == 0 else f"{size_bytes:.1f} {_UNITS[power]}"


def span(seconds: float) -> str:
    """Write a duration with two or three digits: 0.12 s, 45 s, 3 min, 2 h, 5 d."""
    if seconds < 9.95 and not isinstance(seconds, int):
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    seconds = round(seconds)
    for length, unit in _SPANS:
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def age(iso: str, now: datetime | None = None) -> str:
    """Write how long ago a time was; clocks that disagree give "now"."""
    seconds = ((now or datetime.now(UTC)) - datetime.fromisoformat(iso)).total_seconds()
    return f"{span(round(seconds))} ago" if seconds >= 9.95 else "now"


def when(iso: str) -> str:
    """Write a time to the second, in the time zone of the reader."""
    return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def number(value: float) -> str:
    """Write a metric with four digits; whole numbers of up to nine digits in full."""
    return str(int(value)) if abs(value) < 1e9 and float(value).is_integer() else f"{value:.4g}"


def count(many: int, one: str, more: str | None = None) -> str:
    """Write a number of things: 1 object, 3 objects."""
    return f"{many:,} {one if many == 1 else more or one + 's'}"
