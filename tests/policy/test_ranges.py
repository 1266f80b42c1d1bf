"""Which bytes are asked for together."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.policy.ranges import Span, merge_spans

SPANS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 300)).map(lambda at: Span(at[0], at[0] + at[1])))


def inside(span: Span, reads: list[Span]) -> bool:
    return any(read.begin <= span.begin and span.end <= read.end for read in reads)


def covered(spans: list[Span]) -> int:
    return len({byte for span in spans for byte in range(span.begin, span.end)})


@given(SPANS, st.integers(0, 200), st.integers(1, 2000), st.integers(1, 50))
def test_every_span_lies_within_one_read(spans: list[Span], gap: int, most_bytes: int, most: int) -> None:
    """Whatever the limits, all that is wanted is read, in order, and no byte twice."""
    reads = merge_spans(spans, gap_bytes=gap, max_bytes=most_bytes, most=most)
    assert all(inside(span, reads) for span in spans)
    assert all(one.end <= two.begin for one, two in pairwise(reads))
    assert len(reads) <= max(most, 1)


@given(SPANS, st.integers(0, 200), st.integers(1, 2000))
def test_little_is_read_that_nobody_wants(spans: list[Span], gap: int, most_bytes: int) -> None:
    """All gaps that are read are together at most a twenty-fifth of what is wanted."""
    reads = merge_spans(spans, gap_bytes=gap, max_bytes=most_bytes, most=10**6)
    assert covered(reads) - covered(spans) <= 0.04 * sum(span.end - span.begin for span in set(spans))


def test_neighbours_are_read_together_up_to_a_size() -> None:
    """Spans that touch are one read as long as it has at most `max_bytes`."""
    spans = [Span(at, at + 10) for at in range(0, 100, 10)]
    assert merge_spans(spans, gap_bytes=0, max_bytes=30) == [Span(0, 30), Span(30, 60), Span(60, 90), Span(90, 100)]


def test_a_span_larger_than_a_read_stays_whole() -> None:
    """A region has one digest: it is read as a whole."""
    assert merge_spans([Span(0, 100), Span(100, 110)], gap_bytes=0, max_bytes=30) == [Span(0, 100), Span(100, 110)]


def test_the_smallest_gaps_are_read_first() -> None:
    """Where the waste allows one gap only, it is the smaller one."""
    spans = [Span(0, 100), Span(104, 200), Span(202, 300)]
    assert merge_spans(spans, gap_bytes=10, max_bytes=1000, waste=0.01) == [Span(0, 100), Span(104, 300)]


def test_a_gap_that_costs_more_than_a_request_is_not_read() -> None:
    """`gap_bytes` is where another request is cheaper."""
    assert merge_spans([Span(0, 1000), Span(1011, 2000)], gap_bytes=10, max_bytes=10**6) == [
        Span(0, 1000),
        Span(1011, 2000),
    ]
