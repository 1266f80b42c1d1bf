"""TensorFlow's trackables in runs, beside TensorFlow's own CheckpointManager; all of it in processes of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_runs import ckpt, flip
from tests.support.legs import (
    assert_equal,
    assert_page_goes_on,
    begins,
    check,
    compared,
    hosted,
    random_moments,
    within,
)

MODULE = "tests.integrations.tensorflow_job"
ENVIRONMENT = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}


def on(**options: Any) -> dict[str, Any]:
    return {**options, "environment": ENVIRONMENT}


def test_killed_in_some_steps(tmp_path: Path) -> None:
    """P16, P19, P23, P25, P73: dropout, shuffled data, generators and eager operations go on exactly; tools know it."""
    stops = [1, 12, 30]
    reference, legs, statuses = compared(f"{MODULE}:train", tmp_path, on(), within(stops))
    assert statuses == [0, *[-9] * len(stops), 0]
    assert begins(legs)[1:] == stops
    assert_equal(reference, legs)
    run = tmp_path / "killed/run"
    assert [row["name"] for row in ckpt("show", run, "--json").data["groups"]] == ["train", "rng"]
    newest, before, *_ = (row["step"] for row in ckpt("ls", run, "--json").data["checkpoints"])
    assert "train/tensors" in ckpt("diff", f"{run}@{newest}", f"{run}@{before}").out
    flip(max(run.glob("checkpoint_*/*/train-*.safetensors")), -1)
    assert ckpt("verify", run).status != 0


def test_tensorflows_own_manager_does_not_go_on(tmp_path: Path) -> None:
    """In the same experiment its restore passes assert_consumed, and the numbers that are drawn are others."""
    reference, legs, statuses = compared(f"{MODULE}:train", tmp_path, on(theirs=True), within([12]))
    assert statuses == [0, -9, 0]
    assert begins(legs)[1:] == [12]
    with pytest.raises(AssertionError, match="leg 1 differs in loss of step 13"):
        assert_equal(reference, legs)


def test_the_page_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """P73: the page's block, killed in a step and started again, ends as it does without a kill."""

    def dying(block: str) -> str:
        return f"{block}        ckpt.wait()\n        leg.within(step)\n"

    assert_page_goes_on("TENSORFLOW.md", MODULE, tmp_path, dying, **on())
    one, other = (tmp_path / name / "runs/first" for name in ("reference", "killed"))
    # TensorFlow writes equal positions of an iterator in more ways than one.
    places = [row["place"] for row in ckpt("diff", one, other, "--ignore", "rng", "--json").data["differences"]]
    assert all(place.startswith("train/others/files") for place in places)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_random(seed: int, tmp_path: Path) -> None:
    """P16, P73: kills in steps, in saves and anywhere change no bit."""
    reference, legs, statuses = compared(
        f"{MODULE}:train", tmp_path, on(seed=seed, interval=1 + seed % 3), random_moments(seed)
    )
    assert statuses[-1] == 0
    assert -9 in statuses
    assert_equal(reference, legs)


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_workers_go_on(killed: int, tmp_path: Path) -> None:
    """P73: under a MultiWorkerMirroredStrategy a worker is killed, the chief or the other, and both go on exactly."""
    reference, legs, statuses = compared(f"{MODULE}:workers", tmp_path, on(killed=killed), within([4, 9]))
    assert statuses == [0, -9, -9, 0]
    assert {"end", "end of the second"} <= {what for what, _, _ in reference}
    assert begins(legs)[0] == 0 < begins(legs)[1] <= 4 < begins(legs)[2] <= 9
    assert_equal(reference, legs)


def test_the_checks_of_values_and_refusals(tmp_path: Path) -> None:
    """Every test of tensorflow_checks.py passes."""
    checks = ["tests/integrations/tensorflow_checks.py", str(tmp_path / "checks")]
    hosted(MODULE, ENVIRONMENT, check, checks, tmp_path / "said")
