"""Loaders of others in a plain loop: killed and resumed twice, every sample comes once and in its order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.legs import assert_equal, begins, compared, within

JOB = "tests.integrations.loaders_job:train"
# With workers torchdata 0.11 and datasets 5.2 by themselves begin an epoch again that is resumed twice in its last
# batches, and do not resume a shuffled stream.
KINDS: list[dict[str, Any]] = [
    {"over": "dataset", "workers": 0},
    {"over": "dataset", "workers": 2},
    {"over": "stream", "workers": 0},
    {"over": "shards", "workers": 0},
]


def test_a_stream_of_datasets_is_resumed_twice(tmp_path: Path) -> None:
    """P23: killed in the first epoch and in the last one, a stream goes on with the sample after the last saved one."""
    reference, legs, statuses = compared(JOB, tmp_path, {"over": "stream"}, within([5, 29]))
    assert statuses == [0, -9, -9, 0]
    assert begins(legs) == [0, 5, 29]
    assert_equal(reference, legs)


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_killed_at_random_batches(options: dict[str, Any], tmp_path: Path) -> None:
    """P23: with and without workers, killed within eight batches: the ends of epochs and their first batches too."""
    stops = sorted({0, 11, 12, 24, *random.Random(str(options)).sample(range(36), 4)})
    reference, legs, statuses = compared(JOB, tmp_path, options, within(stops))
    assert statuses == [0, *[-9] * len(stops), 0]
    assert begins(legs)[1:] == stops
    assert_equal(reference, legs)


@pytest.mark.slow
def test_workers_of_a_stream_know_the_epoch_of_its_state(tmp_path: Path) -> None:
    """P23: workers begin with the restore, before the loop can tell the stream its epoch; the second epoch goes on."""
    stops = [5, 15, 20, 29]
    reference, legs, statuses = compared(JOB, tmp_path, {"over": "stream", "workers": 2}, within(stops))
    assert statuses == [0, *[-9] * len(stops), 0]
    assert_equal(reference, legs)


# What warnings of a program and its state say; others are of a store or a machine that is slow.
OF_PROGRAMS = (
    "position",
    "state",
    "DataLoader",
    "differ",
    "settings",
    "range(N)",
    "left to train",
    "not saved",
    "seed",
)
QUIET: list[tuple[str, dict[str, Any]]] = [
    (JOB, {"over": "ours"}),
    (JOB, {"over": "dataset"}),
    ("tests.integrations.lightning_job:train", {"ema": True}),
    ("tests.integrations.lightning_job:train", {"loader": "stateful"}),
    ("tests.integrations.huggingface_job:train", {"epochs": 2}),
]


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("job", "options"), QUIET, ids=str)
def test_a_right_program_is_warned_of_nothing(job: str, options: dict[str, Any], workers: int, tmp_path: Path) -> None:
    """Killed and resumed with and without workers, in each framework, no line of a program that goes on is a warning.

    Started once more, the finished ones of Lightning and Hugging Face are told that nothing was left.
    """
    options = {**options, "workers": workers, "args": {"dataloader_num_workers": workers}}
    reference, legs, statuses = compared(job, tmp_path, options, [("step", 5), ("step", 17), ("step", 100)])
    assert statuses == [0, -9, -9, 0, 0]
    warned = [
        [told for what, _, told in leg if what == "warned" and any(one in told for one in OF_PROGRAMS)]
        for leg in (reference, *legs)
    ]
    assert warned[:4] == [[]] * 4
    assert all("left to train" in told for told in warned[4])
    assert len(warned[4]) == (job != JOB)
