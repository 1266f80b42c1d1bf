"""Parse a run's JSON, and check it against the types of the records that it holds.

Check the digest of a text before its contents mean anything: a digest finds damage, and a type finds a text of another
program. Parsing never runs code, and ends with an error of ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ckpt_tasks.errors import FormatVersionError, IntegrityError

FORMAT_VERSION = 1  # Every manifest, segment, seal and ledger entry has the version of the format.
MAX_INT64 = 2**63 - 1
_MAX_S = 1e9  # No duration is longer (30 years).
_MAX_LEVELS = 100  # Only notes of users nest so deep.

Count = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]
Seconds = Annotated[float, Meta(ge=-_MAX_S, le=_MAX_S)]
Digest = Annotated[str, Meta(description="digest")]
Name = Annotated[str, Meta(description="name")]  # Of an object, relative to the run directory.
Time = Annotated[str, Meta(description="time")]

# The code that reads a value may raise any of these for an unexpected form.
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


@contextmanager
def well_formed(what: str, key: str | None = None, faults: tuple[type[Exception], ...] = MALFORMED) -> Iterator[None]:
    """Raise IntegrityError ("`what` is malformed") if the block raises one of `faults`."""
    try:
        yield
    except faults as error:
        raise IntegrityError(f"{what} is malformed: {error!r:.200}", key=key) from error


_Record = TypeVar("_Record")


def parse_json(data: bytes, *, encoding: str = "ascii") -> Any:
    """Parse JSON; raise one of MALFORMED if it is malformed, nests too deep or has NaN or Infinity.

    Our own JSON is ASCII; only headers of shards are UTF-8.
    """
    return json.loads(str(data, encoding), parse_constant=_no_json)


def declared(kind: type[_Record]) -> type[_Record]:
    """Prepare the class of a record for `typed`, where the class is defined.

    msgspec prepares a class at its first use, and a second thread that uses the class meanwhile crashes (found with
    msgspec 0.22).
    """
    msgspec.json.Decoder(kind)
    return kind


def typed(value: Any, kind: type[_Record]) -> _Record:
    """Return JSON data as a record of a `declared` dataclass.

    Raise one of MALFORMED if a field is unknown, missing or wrong.
    """
    if odd := value.keys() ^ vars(kind)["__dataclass_fields__"].keys():
        raise ValueError(f"the field {min(odd)!r:.40} is unknown or missing")
    return msgspec.convert(value, kind)


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
    return msgspec.convert(value, str)


def whole(value: Any, most: int = MAX_INT64) -> int:
    """Return a whole number from 0 to `most` unchanged; raise ValueError for any other value."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r:.80} is not a whole number from 0 to {most}")
    return value


def finite_json(value: Any, levels: int = _MAX_LEVELS) -> Any:
    """Replace NaN and infinity by strings that float() can read: JSON has no such numbers.

    Raises ValueError if the value nests deeper than these levels: a reader could not parse it.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping | list | tuple) and not levels:
        raise ValueError(f"it nests deeper than {_MAX_LEVELS} levels")
    if isinstance(value, Mapping):
        return {key: finite_json(item, levels - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(item, levels - 1) for item in value]
    return value


def _no_json(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


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
