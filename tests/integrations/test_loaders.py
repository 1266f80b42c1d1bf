"""Loaders of others in a plain loop: killed and resumed twice, every sample comes once and in its order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.legs import assert_equal, begins, compared

JOB = "tests.integrations.loaders_job:train"
KINDS = [{"over": over, "workers": workers} for over in ("dataset", "stream", "shards") for workers in (0, 2)]


def test_a_stream_of_datasets_is_resumed_twice(tmp_path: Path) -> None:
    """P23: killed in the first epoch and in the last one, a stream goes on with the sample after the last saved one."""
    reference, legs, statuses = compared(JOB, tmp_path, {"over": "stream"}, [5, 29])
    assert statuses == [0, -9, -9, 0]
    assert begins(legs) == [0, 5, 29]
    assert_equal(reference, legs)


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_killed_at_random_batches(options: dict[str, Any], tmp_path: Path) -> None:
    """P23: with and without workers, killed within eight batches: the ends of epochs and their first batches too."""
    stops = sorted({0, 11, 12, 24, *random.Random(str(options)).sample(range(36), 4)})
    reference, legs, statuses = compared(JOB, tmp_path, options, stops)
    assert statuses == [0, *[-9] * len(stops), 0]
    assert begins(legs)[1:] == stops
    assert_equal(reference, legs)
