"""Texts for people: sizes, ages, durations, metrics, and the tables of a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckpt_tasks.format.parsing import moment_of

if TYPE_CHECKING:
    from rich.table import Table

    from ckpt_tasks.format.records import RunCheck

HEADER_STYLE = "dim"  # The style of every table's header.

_LARGEST = sys.float_info.max  # An int can be larger than any float.
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_LONGEST_S = 1e9
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


def fine_span(seconds: float) -> str:
    """Write a duration with two digits or three: 0.2 ms, 45 ms, 1.5 s, 99 s, 3.3 min, 27 h, 2.5 d."""
    for length_s, unit, most in ((1e-3, "ms", 995), (1, "s", 120), (60, "min", 120), (3_600, "h", 48)):
        amount = seconds / length_s
        if amount < most:
            return f"{amount:.{1 if amount < 9.95 else 0}f} {unit}"
    return f"{seconds / 86_400:.{1 if seconds < 9.95 * 86_400 else 0}f} d"


def percent(part: float) -> str:
    """Write a share of all time with two digits or more: 0.034 %, 0.34 %, 3.4 %, 34 %."""
    amount = 100 * part
    if 0 < amount < 0.001:
        return "< 0.001 %"
    digits = next(digits for least, digits in ((9.95, 0), (0.995, 1), (0.0995, 2), (0, 3)) if amount >= least)
    return f"{amount:.{digits}f} %"


def clock(seconds: float) -> str:
    """Write a remaining time to the second: 0:09, 12:34, 1:02:03; "?" if it is not finite."""
    if not 0 <= seconds < _LONGEST_S:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def age(iso: str, now: datetime | None = None) -> str:
    """Write how long ago a time was; "now" for a time in the future, "?" for an invalid one."""
    moment = moment_of(iso)
    if moment is None:
        return "?"
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    return f"{span(round(seconds))} ago" if seconds >= 1 else "now"


def check_words(check: RunCheck) -> str:
    """Write the result of a check of a run in a sentence."""
    return _CHECKS[check.kind](check, check.figures, f"on {printable(check.host)}, {age(check.at)}")


def _drill_words(drill: RunCheck, figures: Mapping[str, float], at: str) -> str:
    if drill.fault is not None:
        return f"A restore drill of step {figures['step']} failed {at}: {printable(drill.fault)}"
    by = f", on {figures['ranks']} ranks" if figures["ranks"] > 1 else ""
    return f"A restore drill of step {figures['step']} took {fine_span(figures.get('restore_s', 0.0))} {at}{by}."


def _verify_words(check: RunCheck, figures: Mapping[str, float], at: str) -> str:
    many = count(int(figures["checkpoints"]), "checkpoint")
    if check.fault is None:
        return f"The run was verified {at}: {many} good."
    records = count(int(figures["damaged_records"]), "record")
    bad = f"{figures['damaged_checkpoints']} of {many} damaged, and {records}"
    return f"A verification {at}, found {bad}: {printable(check.fault)}"


_CHECKS = {"drill": _drill_words, "verify": _verify_words}


def when(iso: str) -> str:
    """Write a time to the second in the reader's time zone; "?" for an invalid one."""
    moment = moment_of(iso)
    return "?" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def utc(at_s: float) -> str:
    """Write seconds since 1970 as a time in UTC; "?" for an invalid one."""
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "?"


def ranks_words(step: int, was: int, here: int) -> str:
    """Say that another number of ranks resumes a checkpoint than has saved it, and what that changes."""
    saved = f"Step {step} was saved by {count(was, 'rank')}, and {here} {'resumes' if here == 1 else 'resume'} it"
    new = "" if here == 1 else "the random streams of all but rank 0 are new, and "
    changes = f"{new}a step has {here}/{was} of its samples if each rank has as many as before"
    return f"{saved}: {changes}. To resume with {was}: --ranks {was} (ranks={was})."


def printable(text: str) -> str:
    """Escape the control characters in a text from a run directory: they could overwrite a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


def number(value: float) -> str:
    """Write a metric with four digits; whole numbers of up to nine digits in full."""
    if abs(value) < 1e9 and float(value).is_integer():
        return str(int(value))
    small = type(value) is float or abs(value) <= _LARGEST
    return f"{value:.4g}" if small else "over 1e+308"


def count(many: int, one: str, more: str | None = None) -> str:
    """Write a count with its noun: 1 object, 3 objects."""
    return f"{many:,} {one if many == 1 else more or one + 's'}"


def plain_table() -> Table:
    """Make a table without columns in the common style of all verbs."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, header_style=HEADER_STYLE, border_style="dim", pad_edge=False, padding=(0, 1))
