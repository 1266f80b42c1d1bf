"""Lightning: killed, resumed, killed and resumed again, a training ends bit for bit as without a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import open_run
from ckpt_tasks.upkeep.upkeep import verify_run_directory
from tests.support.legs import assert_equal, begins, compared, random_moments, within

JOB = "tests.integrations.lightning_job:train"
OWN = "tests.integrations.lightning_job:own"
EVALUATED = "tests.integrations.lightning_job:evaluated"


def test_killed_twice_it_ends_as_without_a_stop(tmp_path: Path) -> None:
    """P16, P73: SIGKILL in an epoch, in a save and in an epoch's first step: all values and streams are equal.

    Losses, means of epochs, moments, the scaler and averages of the weights are recorded; a training that has ended
    ends the same when it is started again.
    """
    options = {"scaled": True, "ema": True}
    reference, legs, statuses = compared(
        JOB, tmp_path, options, [("step", 5), ("files", 200), ("step", 24), ("steps", 36)]
    )
    assert statuses == [0, -9, -9, -9, 0, 0]
    *legs, ended = legs
    first, second, third, last = begins(legs)
    assert (first, second, last) == (0, 5, 24)
    assert 5 <= third < 24
    assert_equal(reference, legs)
    assert [line for line in ended if line[0] != "warned"] == reference[-2:]
    assert set(open_run(str(tmp_path / "killed/run")).find("latest").metrics) >= {"loss", "loss_epoch", "val"}


@pytest.mark.parametrize(
    "options",
    [{"every": 6}, {"every": 6, "estimates": True}, pytest.param({"epochs": 3}, marks=pytest.mark.slow)],
    ids=str,
)
def test_lightnings_own_checkpoints_are_ours(options: dict[str, Any], tmp_path: Path) -> None:
    """P73: ModelCheckpoint and `ckpt_path="last"` alone, killed twice: weights and moments are equal; all verifies."""
    # Not an epoch's last batch: resumed there, Lightning 2.6 trains other batches, with files of its own too.
    stops = [6, 9] if "every" in options else [2, 7, 14, 29]
    reference, legs, statuses = compared(OWN, tmp_path, options, within(stops))
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
    options = {"epochs": 3, "async": seed % 2 == 1}
    reference, legs, statuses = compared(OWN, tmp_path, options, random_moments(seed, 12))
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
    assert (
        found["left", 0] == "[]"
    )  # a path has its name once it has its checkpoint: Lightning goes on from what it finds
    assert "WeightAveraging or EMAWeightAveraging" in found["averaging", 0]
    assert "not saved by CkptCheckpointIO" in found["kept", 0]
