"""Lightning: killed, resumed, killed and resumed again, a training ends bit for bit as without a stop."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import open_run
from ckpt_tasks.upkeep.upkeep import verify_run_directory
from tests.support.legs import assert_equal, begins, compared, random_moments, within

JOB = "tests.integrations.lightning_job:train"
OWN = "tests.integrations.lightning_job:own"
RANKS = "tests.integrations.lightning_job:ranks"
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


def test_a_plateau_takes_its_step_in_a_resumed_epoch(tmp_path: Path) -> None:
    """P19: a schedule that needs a metric steps at the end of the epoch in which a training was resumed."""
    reference, legs, statuses = compared(JOB, tmp_path, {"plateau": True}, within([5, 17]))
    assert statuses == [0, -9, -9, 0]
    assert_equal(reference, legs)


@pytest.mark.parametrize(
    "options",
    [{"metric": True, "unfreezing": True}, pytest.param({"accumulates": True}, marks=pytest.mark.slow)],
    ids=str,
)
def test_what_an_epochs_start_sets_is_resumed(options: dict[str, Any], tmp_path: Path) -> None:
    """P19: a resumed epoch keeps its unfrozen layers, its accumulation and the sums of its torchmetrics."""
    reference, legs, statuses = compared(JOB, tmp_path, options, within([5, 14]))
    assert statuses == [0, -9, -9, 0]
    assert_equal(reference, legs)


# What touches the loaders or draws numbers before the first batch is trained, and what a step leaves behind.
BETWEEN: list[dict[str, Any]] = [
    {"estimates": True},
    {"estimates": True, "loader": "stateful", "workers": 2},
    {"module": "drawing"},
    {"module": "drawing", "workers": 2, "estimates": True},
    {"module": "drawing", "loader": "stateful"},
    {"module": "pairs", "loader": "pairs"},
    {"module": "pairs", "loader": "pairs", "workers": 2, "estimates": True},
    {"module": "fetching"},
    {"module": "manual"},
    {"module": "manual", "late": True, "workers": 2},
    {"module": "accumulating"},
    {"late": True},
]


@pytest.mark.parametrize("options", BETWEEN, ids=str)
def test_what_comes_between_two_batches_goes_on(options: dict[str, Any], tmp_path: Path) -> None:
    """P16, P25, P73: data set up early, numbers drawn around a transfer, gradients that wait, states made late."""
    reference, legs, statuses = compared(JOB, tmp_path, options, within([1, 12, 28]))
    assert statuses == [0, -9, -9, -9, 0]
    assert_equal(reference, legs)


VARIANTS: list[dict[str, Any]] = [
    {"workers": 2},
    {"accumulate": 4},
    {"val": 0.25, "plateau": True},
    {"val": 5},
    {"early": True, "plateau": True},
    {"ema": True},
    {"precision": "bf16-mixed"},
    {"scaled": True, "accumulate": 2},
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
    reference, legs, statuses = compared(JOB, tmp_path, options, within(range(1, last, 2)))
    assert statuses[0] == statuses[-1] == 0
    assert_equal(reference, legs)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_random(seed: int, tmp_path: Path) -> None:
    """P16, P73: kills in steps, in saves and anywhere, in Lightning's start too, change no bit.

    Schedule, scaler, averages of weights (Lightning's callback and one's own), means of epochs, position in the data
    and random streams are in the state.
    """
    options = {"val": 0.5, "ema": seed % 2 == 1, "scaled": True}
    reference, legs, statuses = compared(JOB, tmp_path, options, random_moments(seed))
    assert statuses[-1] == 0
    assert -9 in statuses
    assert_equal(reference, legs)


def test_sigterm_ends_after_the_step_with_a_commit(tmp_path: Path) -> None:
    """P69: the step in hand is finished and committed, and Lightning ends as it does after a SIGTERM."""
    reference, legs, statuses = compared(JOB, tmp_path, {"interval": 100}, within([7]), number=signal.SIGTERM)
    assert statuses == [0, 0, 0]  # Lightning raises SystemExit
    assert begins(legs) == [0, 8]
    assert_equal(reference, legs)


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


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"killed": 0}, {"killed": 1, "callback": True}], ids=str)
def test_two_ranks_go_on(options: dict[str, Any], tmp_path: Path) -> None:
    """P73: under DDP a rank is killed, and both go on bit for bit, with Lightning's own checkpoints and with a run."""
    reference, legs, statuses = compared(RANKS, tmp_path, options, within([3, 8]))
    assert statuses == [0, -9, -9, 0]
    assert begins(legs)[0] == 0 < begins(legs)[1] <= 3 < begins(legs)[2] <= 8
    assert_equal(reference, legs)


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
