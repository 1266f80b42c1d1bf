"""Which bytes are asked for together."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.format.policy.ranges import Span, merge_spans

SPANS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 300)).map(lambda at: Span(at[0], at[0] + at[1])))


def covered(spans: list[Span]) -> int:
    return len({byte for span in spans for byte in range(span.begin, span.end)})


@given(SPANS, st.integers(0, 200), st.integers(1, 2000), st.integers(1, 50) | st.just(10**6))
def test_every_span_lies_within_one_read(spans: list[Span], gap: int, most_bytes: int, most: int) -> None:
    """All that is wanted is read, no byte twice; gaps are a twenty-fifth of it, unless there are too many reads."""
    reads = merge_spans(spans, gap_bytes=gap, max_bytes=most_bytes, most=most)
    assert all(any(read.begin <= span.begin and span.end <= read.end for read in reads) for span in spans)
    assert all(one.end <= two.begin for one, two in pairwise(reads))
    assert len(reads) <= most
    if most == 10**6:
        assert covered(reads) - covered(spans) <= 0.04 * sum(span.end - span.begin for span in set(spans))


@pytest.mark.parametrize(
    ("spans", "options", "reads"),
    [
        ([(n, n + 10) for n in range(0, 100, 10)], {"max_bytes": 30}, [(0, 30), (30, 60), (60, 90), (90, 100)]),
        ([(0, 100), (100, 110)], {"max_bytes": 30}, [(0, 100), (100, 110)]),  # a region has one digest
        ([(0, 100), (104, 200), (202, 300)], {"gap_bytes": 10, "waste": 0.01}, [(0, 100), (104, 300)]),
        ([(0, 1000), (1011, 2000)], {"gap_bytes": 10}, [(0, 1000), (1011, 2000)]),
    ],
    ids=["up to a size", "a large span is whole", "the smallest gap first", "a gap that costs more than a request"],
)
def test_what_is_read_together(
    spans: list[tuple[int, int]], options: dict[str, Any], reads: list[tuple[int, int]]
) -> None:
    """Neighbours and small gaps are one read, as far as size, waste and the cost of a request allow."""
    found = merge_spans([Span(*span) for span in spans], **{"gap_bytes": 0, "max_bytes": 10**6, **options})
    assert found == [Span(*read) for read in reads]
