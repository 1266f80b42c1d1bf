"""Streams in processes that are killed: the samples and the weights are those of a training without a stop."""

from __future__ import annotations

import zlib
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.legs import assert_equal, begins, compared, random_moments, within

pytestmark = pytest.mark.framework
JOB = "tests.state.data.streams_job:train"
KINDS = ("map and filter", "interleave", "shuffle", "augmented", "shuffle, buffer", "interleave, buffer", "webdataset")
ROWS = [{"over": kind, "workers": workers} for kind, workers in product(KINDS, (0, 2))]
ROWS += [{**row, "ranks": 2} for row in ROWS if row["over"] != "interleave"]
ROWS += [{"over": "by number", "workers": 2, "ranks": 2}, {"over": "by number", "ranks": 2, "ranks at last": 3}]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_killed_twice_at_random(row: dict[str, Any], tmp_path: Path) -> None:
    """P16, P22, P25, P73: killed in steps, in saves and anywhere, on one rank and on two, no sample or bit differs."""
    moments = random_moments(zlib.crc32(str(row).encode()), kills=2)
    reference, legs, statuses = compared(JOB, tmp_path, row, moments)
    assert statuses[-1] == 0
    assert_equal(reference, legs)


@pytest.mark.parametrize(
    "row", [{"over": "shuffle, buffer", "ranks": 2}, {"over": "by number", "ranks": 2, "ranks at last": 3}], ids=str
)
def test_killed_in_two_steps(row: dict[str, Any], tmp_path: Path) -> None:
    """P16, P24, P73: ranks go on exactly where they were killed; a sampler with another number of them, too."""
    reference, legs, statuses = compared(JOB, tmp_path, row, within([3, 8]))
    assert statuses == [0, -9, -9, 0]
    assert begins(legs)[1:] == [3, 8]
    assert_equal(reference, legs)


def test_another_number_of_ranks_is_refused_by_name(tmp_path: Path) -> None:
    """P24: each rank has its part of a stream, and the parts of two are not those of three."""
    row = {"over": "shuffle", "ranks": 2, "ranks at last": 3}
    with pytest.raises(AssertionError, match=r"StateMismatchError[^\n]*data"):
        compared(JOB, tmp_path, row, within([3]))
