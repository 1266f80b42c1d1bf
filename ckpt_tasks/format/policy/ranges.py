"""Choose which bytes of an object to request together: each request costs time, and so do unneeded bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """The bytes from `begin` up to `end` of an object."""

    begin: int
    end: int


def merge_spans(
    wanted: Iterable[Span], *, gap_bytes: int, max_bytes: int, waste: float = 0.04, most: int = 1024
) -> list[Span]:
    """Merge spans into reads, in order; every span lies within one read.

    Gaps of up to `gap_bytes` are read too, the smallest first, as long as together they are at most `waste` times the
    wanted bytes. A read has at most `max_bytes`, unless a single span has more, or there would be more than `most`
    reads.
    """
    spans = sorted(set(wanted))
    if not spans:
        return []
    budget = int(waste * sum(span.end - span.begin for span in spans))
    taken: set[int] = set()
    for gap, at in sorted(_gaps(spans)):
        if gap > 0 and (gap > gap_bytes or gap > budget):
            break
        budget -= max(gap, 0)
        taken.add(at)
    reads = _merged(spans, taken, max_bytes)
    return reads if len(reads) <= most else _at_most(spans, most)


def _gaps(spans: list[Span]) -> list[tuple[int, int]]:
    return [(spans[at].begin - spans[at - 1].end, at) for at in range(1, len(spans))]


def _merged(spans: list[Span], taken: set[int], max_bytes: int) -> list[Span]:
    reads = [spans[0]]
    for at, span in enumerate(spans[1:], 1):
        last = reads[-1]
        joined = Span(last.begin, max(last.end, span.end))
        overlap = span.begin < last.end
        if overlap or (at in taken and joined.end - joined.begin <= max_bytes):
            reads[-1] = joined
        else:
            reads.append(span)
    return reads


def _at_most(spans: list[Span], most: int) -> list[Span]:
    widest = sorted(_gaps(spans), reverse=True)[: most - 1]
    apart = {at for gap, at in widest if gap >= 0}
    return _merged(spans, set(range(1, len(spans))) - apart, spans[-1].end)
