"""Streams in processes that are killed: the samples and the weights are those of a training without a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.legs import assert_equal, begins, compared, within

pytestmark = pytest.mark.framework
JOB = "tests.state.data.streams_job:train"


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
