"""Bounded parsing of a run's JSON: a small text must not exhaust the stack or the memory.

Python's parser recurses as deep as the text nests, which can kill the process if the recursion limit is raised. Its
objects take up to 30 times the memory of their text. So this module first checks the text without parsing it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

from ckpt_tasks.errors import FormatVersionError, IntegrityError

FORMAT_VERSION = 1  # Every manifest, segment, seal and ledger entry has the version of the format.
MAX_JSON_DEPTH = 400  # A tree of 100 levels has about 300 levels of JSON.
MAX_CONTAINERS = 1 << 22  # The limit for lists and objects; a parameter and its Adam state need five.
MAX_VALUES = 1 << 24
MAX_INT64 = 2**63 - 1

# The code that reads a value may raise any of these for an unexpected form.
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


@contextmanager
def well_formed(what: str, key: str | None = None, faults: tuple[type[Exception], ...] = MALFORMED) -> Iterator[None]:
    """Raise IntegrityError ("`what` is malformed") if the block raises one of `faults`."""
    try:
        yield
    except faults as error:
        raise IntegrityError(f"{what} is malformed: {error!r:.200}", key=key) from error


_MARKS = b'"[]{},'
_OTHERS = bytes(sorted({*range(256)} - {*_MARKS}))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_SHALLOW = 16
_MAX_QUOTES = 1 << 23  # At most this many quotes around strings with brackets or commas in them.
_DIGITS = 4300  # Python's own default limit for whole numbers.


def parse_json(data: bytes, *, encoding: str = "ascii", max_depth: int = MAX_JSON_DEPTH) -> Any:
    """Parse JSON; raise ValueError if it is malformed, nests too deep or has too many values.

    NaN and Infinity raise as well. Our own JSON is ASCII; only headers of shards are UTF-8.
    """
    check_json(data, max_depth=max_depth)
    digits = sys.get_int_max_str_digits()
    reads_digits = None if 0 < digits <= _DIGITS else _whole_number
    return json.loads(str(data, encoding), parse_constant=_no_json, parse_int=reads_digits)


def check_json(data: bytes, *, max_depth: int = MAX_JSON_DEPTH) -> None:
    """Raise ValueError if JSON nests too deep or has too many values; the JSON may be malformed."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = data.translate(None, _OTHERS).replace(b'""', b"")
    if marks.count(b'"') > _MAX_QUOTES:
        raise ValueError("more texts with brackets in them than anything that is written")
    marks = b"".join(marks.split(b'"')[::2])  # Remove the texts between quotes.
    brackets = marks.translate(None, b",")
    containers = brackets.count(b"[") + brackets.count(b"{")
    if containers > MAX_CONTAINERS or len(marks) - len(brackets) + containers > MAX_VALUES:
        raise ValueError(f"more than {MAX_CONTAINERS} lists and objects or {MAX_VALUES} values")
    if _is_deeper(brackets, max_depth):
        raise ValueError(f"nested deeper than {max_depth} levels")


def check_version(version: Any, name: str) -> None:
    """Raise FormatVersionError for a newer version of the format, IntegrityError for what is not a version number."""
    if type(version) is not int or version < 1:
        raise IntegrityError(f"{version!r:.40} is not a format version", key=name)
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"format version {version!r:.40} is newer than {FORMAT_VERSION}, the newest that this code reads",
            key=name,
            hint="Upgrade ckpt-tasks.",
        )


def text(value: Any) -> str:
    """Return a text unchanged; raise ValueError for any other value."""
    if type(value) is not str:
        raise ValueError(f"{value!r:.80} is not text")
    return value


def whole(value: Any, most: int = MAX_INT64) -> int:
    """Return a whole number from 0 to `most` unchanged; raise ValueError for any other value."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r:.80} is not a whole number from 0 to {most}")
    return value


def finite(value: Any, most: float = 1e300) -> float:
    """Return a number from -`most` to `most` as a float; raise ValueError for any other value."""
    if type(value) not in (int, float) or not -most <= value <= most:
        raise ValueError(f"{value!r:.80} is not a number")
    return float(value)


def flag(value: Any) -> bool:
    """Return a boolean unchanged; raise ValueError for any other value."""
    if type(value) is not bool:
        raise ValueError(f"{value!r:.80} is neither true nor false")
    return value


def optional(value: Any) -> str | None:
    """Return a text or None unchanged; raise ValueError for any other value."""
    return None if value is None else text(value)


def finite_json(value: Any) -> Any:
    """Replace NaN and infinity by strings that float() can read: JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(item) for item in value]
    return value


def _is_deeper(brackets: bytes, most: int) -> bool:
    rest = brackets
    for _ in range(_SHALLOW):  # These rounds run at the speed of memory and remove all brackets of most JSON.
        if not rest:
            return False  # The JSON has no more levels than these rounds can remove.
        rest = rest.replace(b"{}", b"").replace(b"[]", b"")
    return any(depth > most for depth in accumulate(map(_STEPS.__getitem__, brackets)))


def _no_json(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _whole_number(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def moment_of(iso: Any) -> datetime | None:
    """Read a time in ISO form (UTC if it names no zone); return None if it is not a time.

    A foreign program or a wrong clock may have written the text; a result can be converted to the local zone.
    """
    try:
        moment = datetime.fromisoformat(iso)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        moment.astimezone()
    except (ValueError, TypeError, OverflowError):
        return None
    return moment


def seconds_of(iso: Any) -> float | None:
    """Read a time as `moment_of` does; return seconds since 1970, or None."""
    moment = moment_of(iso)
    return None if moment is None else moment.timestamp()
