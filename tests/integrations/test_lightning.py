"""Lightning: killed, resumed, killed and resumed again, a training ends bit for bit as without a stop."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import open_run
from ckpt_tasks.upkeep.upkeep import verify_run_directory
from tests.support.legs import assert_equal, begins, compared

JOB = "tests.integrations.lightning_job:train"
OWN = "tests.integrations.lightning_job:own"
EVALUATED = "tests.integrations.lightning_job:evaluated"


def test_killed_twice_it_ends_as_without_a_stop(tmp_path: Path) -> None:
    """P73: SIGKILL in the middle of an epoch and in its first step; losses, means of epochs, moments and streams."""
    reference, legs, statuses = compared(JOB, tmp_path, {}, [5, 12])
    assert statuses == [0, -9, -9, 0]
    assert begins(legs) == [0, 5, 12]
    assert_equal(reference, legs)
    assert set(open_run(str(tmp_path / "killed/run")).find("latest").metrics) >= {"loss", "loss_epoch", "val"}


VARIANTS: list[dict[str, Any]] = [
    {"workers": 2},
    {"accumulate": 4},
    {"val": 0.25, "plateau": True},
    {"val": 5},
    {"early": True, "plateau": True},
    {"ema": True},
    {"precision": "bf16-mixed"},
    {"precision": "16-mixed"},
    {"loader": "stateful"},
    {"loader": "stateful", "workers": 2, "accumulate": 2},
    {"loader": "stream"},
    {"loader": "stream", "workers": 2},
    {"interval": 4},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_killed_in_every_other_step(options: dict[str, Any], tmp_path: Path) -> None:
    """P14, P16, P19, P20, P73: schedules, scaler, accumulation, averages, early stop and loaders go on exactly."""
    last = 9 if "accumulate" in options else 36
    reference, legs, statuses = compared(JOB, tmp_path, options, range(1, last, 2))
    assert statuses[0] == statuses[-1] == 0
    assert_equal(reference, legs)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random(seed: int, tmp_path: Path) -> None:
    """P73: a kill that falls anywhere, in Lightning's start and in a commit too, changes no bit."""
    times = [random.Random(seed).uniform(0.05, 0.6) for _ in range(12)]
    reference, legs, statuses = compared(JOB, tmp_path, {"val": 0.5}, [], after_s=times)
    assert statuses[-1] == 0
    assert_equal(reference, [leg for leg in legs if leg])


def test_sigterm_ends_after_the_step_with_a_commit(tmp_path: Path) -> None:
    """P69: the step in hand is finished and committed, and Lightning ends as it does after a SIGTERM."""
    reference, legs, statuses = compared(JOB, tmp_path, {"interval": 100}, [7], number=signal.SIGTERM)
    assert statuses == [0, 0, 0]  # Lightning raises SystemExit
    assert begins(legs) == [0, 8]
    assert_equal(reference, legs)


@pytest.mark.parametrize("options", [{"every": 6}, pytest.param({"epochs": 3}, marks=pytest.mark.slow)], ids=str)
def test_lightnings_own_checkpoints_are_ours(options: dict[str, Any], tmp_path: Path) -> None:
    """P73: ModelCheckpoint and `ckpt_path="last"` alone, killed twice: weights and moments are equal; all verifies."""
    # Not an epoch's last batch: resumed there, Lightning 2.6 trains other batches, with files of its own too.
    stops = [6, 9] if "every" in options else [2, 7, 14, 29]
    reference, legs, statuses = compared(OWN, tmp_path, options, stops)
    assert statuses == [0, *[-9] * len(stops), 0]
    assert begins(legs) == ([0, 6, 6] if "every" in options else [0, *stops])
    assert_equal(reference, legs)
    saved = [*(tmp_path / "killed/own").iterdir()]
    assert saved
    for one in saved:
        faults = verify_run_directory(open_run(str(one)).history)
        assert (faults.good, faults.orphans) == (True, ())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_lightnings_own_checkpoints_killed_at_random(seed: int, tmp_path: Path) -> None:
    """P73: a kill within a save or a removal of ModelCheckpoint leaves a checkpoint that Lightning goes on from."""
    times = [random.Random(seed).uniform(0.3, 1.5) for _ in range(12)]
    options = {"epochs": 3, "async": seed % 2 == 1}
    reference, legs, statuses = compared(OWN, tmp_path, options, [], after_s=times)
    assert statuses[-1] == 0
    assert_equal(
        [line for line in reference if line[0] != "held"], [[x for x in leg if x[0] != "held"] for leg in legs]
    )


def test_lightnings_switches_read_a_run_of_the_callback(tmp_path: Path) -> None:
    """`test(ckpt_path=run)`, `run@6` and `fit(ckpt_path=run)` work as with a file; what cannot be stored is named."""
    reference, _, _ = compared(EVALUATED, tmp_path, {}, [])
    found = {(what, step): value for what, step, value in reference}
    assert found["test", 12] == found["test of the live one", 12] != found["test", 6]
    assert found["trained", 12] == ""
    assert [found["moments", n] for n in range(6)] == ["True"] * 6
    assert "cannot be stored (at lightning/hyper_parameters/make)" in found["refused", 0]
    assert "not saved by CkptCheckpointIO" in found["kept", 0]
