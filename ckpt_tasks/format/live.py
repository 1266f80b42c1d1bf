"""The live checkpoints of a ledger entry, in the entry itself or in segments.

A segment is an object with some consecutive checkpoints; its digest is its name, and it never changes. The newest
checkpoints, the tail, are in the entry itself. An entry reuses the segments of the previous entry, except segments in
which a checkpoint was removed or changed. So a commit writes only the tail and 35 bytes for every segment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.keys import is_live_list, live_list_name
from ckpt_tasks.format.parsing import FORMAT_VERSION, check_version, finite_json, parse_json, text, well_formed
from ckpt_tasks.format.records import Checkpoint, read_checkpoint

MAX_INLINE_CHECKPOINTS = 128
_SEGMENT = 64  # A segment has this many checkpoints; the tail has at most twice as many.

_n = attrgetter("n")


@dataclass(frozen=True)
class Segment:
    """Consecutive live checkpoints, in the order of their commits, and the digest that names their object.

    A parsed entry has only the digest: `checkpoints` is empty until the segment is read.
    """

    digest: str
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def name(self) -> str:
        """The name of the segment's object."""
        return live_list_name(self.digest)


def cut(live: Sequence[Checkpoint], before: Sequence[Segment]) -> tuple[Segment, ...]:
    """Cut a list of checkpoints into segments; the remaining checkpoints are the tail. A short list has no segments.

    `before`: the segments of the previous entry; a segment is reused if its checkpoints have not changed.
    """
    if len(live) <= MAX_INLINE_CHECKPOINTS:
        return ()
    segments: list[Segment] = []
    begin = 0
    for old in before:
        end = bisect_right(live, old.checkpoints[-1].n, lo=begin, key=_n)
        part, begin = live[begin:end], end
        if len(part) == len(old.checkpoints) <= 2 * _SEGMENT and all(map(is_, part, old.checkpoints)):
            segments.append(old)
        elif part:
            segments += _pieces(part, whole=False)
    segments += _pieces(live[begin:], whole=True)
    few = 2 * len(live) // _SEGMENT + 2
    return tuple(segments if len(segments) <= few else _pieces(live, whole=True))


def write_segment(checkpoints: Sequence[Checkpoint]) -> bytes:
    """Write checkpoints as the bytes of a segment."""
    live = [finite_json(asdict(checkpoint)) for checkpoint in checkpoints]
    return canonical_json({"version": FORMAT_VERSION, "live": live})


def read_segment(data: bytes, *, digest: str, name: str) -> tuple[Checkpoint, ...]:
    """Read a segment's checkpoints; raise IntegrityError if the bytes do not have this digest or are malformed."""
    if digest_hex(data) != digest:
        raise IntegrityError("the list of checkpoints is not the one that was committed", key=name)
    with well_formed("the list of checkpoints", name):
        body = parse_json(data)
        check_version(body["version"], name)
        checkpoints = tuple(read_checkpoint(item) for item in body["live"])
        if not checkpoints:
            raise ValueError("an empty list")
    return checkpoints


def write_live(tail: list[Any], segments: Sequence[Segment]) -> Any:
    """Return the entry's field `live` as JSON data; `tail`: the newest checkpoints as JSON data."""
    return {"segments": [segment.digest for segment in segments], "tail": tail} if segments else tail


def read_live(live: Any) -> tuple[tuple[Segment, ...], list[Any]]:
    """Read an entry's field `live`: return the segments, and the tail as JSON data. Raises ValueError."""
    if not isinstance(live, dict):
        return (), live
    digests = [text(digest) for digest in live["segments"]]
    strange = [digest for digest in digests if not is_live_list(live_list_name(digest))]
    if strange or len(set(digests)) < len(digests):
        raise ValueError(f"{strange[:1]!r:.80}: a segment has a strange name, or stands twice in one list")
    return tuple(map(Segment, digests)), live["tail"]


def joined_segments(segments: Sequence[Segment], tail: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return all live checkpoints: the segments' checkpoints, then the tail."""
    return tuple(chain(*(segment.checkpoints for segment in segments), tail))


def _pieces(part: Sequence[Checkpoint], *, whole: bool) -> Iterator[Segment]:
    """Cut checkpoints into new segments; if `whole`, only into full segments, and leave the rest as a tail."""
    for begin in range(0, len(part), _SEGMENT):
        if whole and len(part) - begin < 2 * _SEGMENT:
            return
        piece = tuple(part[begin : begin + _SEGMENT])
        yield Segment(digest_hex(write_segment(piece)), piece)
