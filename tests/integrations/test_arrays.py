"""JAX, Keras and TensorFlow are killed and go on bit for bit. None goes with forks of a test: all run in hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_runs import ckpt, flip
from tests.support.legs import (
    assert_equal,
    assert_page_goes_on,
    begins,
    compared,
    random_moments,
    within,
)
from tests.support.sweeps import drawn, sparse

Row = tuple[str, str, dict[str, Any], list[int]]
BACKENDS = ("torch", "jax", "tensorflow")
pytestmark = pytest.mark.framework
slow = pytest.mark.slow


def job(framework: str) -> str:
    return f"tests.integrations.{framework}_job"


def on(backend: str, **options: Any) -> dict[str, Any]:
    """Return the options of a job, with the backend of Keras; JAX by itself has none."""
    environment = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"} if backend else {}
    return {**options, "environment": environment}


QUICK: list[Row] = [
    ("jax", "", {"devices": 4}, [12, 30]),
    ("keras", "jax", {"together": 3}, [12, 27]),
    ("tensorflow", "tensorflow", {}, [1, 30]),
]
SLOW: list[Row] = [
    *(("jax", "", options, [1, 12, 13, 30]) for options in ({}, {"devices": 4})),
    ("keras", "torch", {}, [1, 12, 25]),
    ("keras", "tensorflow", {}, [5, 12, 25]),
    *(("keras", backend, {"schedule": True, "workers": 2}, [1, 13, 24]) for backend in BACKENDS),
    *(("keras", backend, {"accumulate": 2}, [1, 14, 23]) for backend in BACKENDS),
    # The last execution of an epoch is short.
    *(("keras", backend, {"together": 5}, [5, 12, 29]) for backend in ("jax", "tensorflow")),
]
GROUPS = {
    "jax": {"train": "stateful", "data": "stateful", "rng": "rng"},
    "keras": {**dict.fromkeys(("model", "optimizer", "seeds", "metrics", "data"), "stateful"), "rng": "rng"},
    "tensorflow": {"train": "stateful", "rng": "rng"},
}


@pytest.mark.parametrize(("framework", "backend", "options", "stops"), [*QUICK, *sparse(SLOW, 2)], ids=str)
def test_killed_in_some_steps(
    framework: str, backend: str, options: dict[str, Any], stops: list[int], tmp_path: Path
) -> None:
    """P16, P19, P20, P23, P25, P73: each start begins exactly where the last one was killed, and no bit differs.

    Losses, metrics, means of epochs, shuffled data and all generators go on; the tools know the run, and see damage.
    """
    reference, legs, statuses = compared(f"{job(framework)}:train", tmp_path, on(backend, **options), within(stops))
    assert statuses == [0, *[-9] * len(stops), 0]
    assert begins(legs)[1:] == stops
    assert_equal(reference, legs)
    assert [told for leg in (reference, *legs) for what, _, told in leg if what == "warned" and "saved" in told] == []
    run = tmp_path / "killed/run"
    assert {row["name"]: row["kind"] for row in ckpt("show", run, "--json").data["groups"]} == GROUPS[framework]
    newest, before, *_ = (row["step"] for row in ckpt("ls", run, "--json").data["checkpoints"])
    assert ckpt("diff", f"{run}@{newest}", f"{run}@{before}").status == 1
    flip(max(run.glob("checkpoint_*/*/*[ln]-*.safetensors")), -1)
    assert ckpt("verify", run).status != 0


@slow
@pytest.mark.parametrize("seed", drawn(1, 12))
@pytest.mark.parametrize("framework", GROUPS)
def test_killed_at_random(framework: str, seed: int, tmp_path: Path) -> None:
    """P16, P73: kills in steps, in saves and anywhere, in a framework's start too, change no bit."""
    backend = {"jax": "", "keras": BACKENDS[seed % 3], "tensorflow": "tensorflow"}[framework]
    own = {"schedule": seed % 2 == 0} if framework == "keras" else {"seed": seed, "devices": (1, 4)[seed % 2]}
    options = on(backend, interval=1 + seed % 3, **own)
    reference, legs, statuses = compared(f"{job(framework)}:train", tmp_path, options, random_moments(seed))
    assert statuses[-1] == 0
    assert -9 in statuses
    assert_equal(reference, legs)


def test_tensorflows_own_manager_does_not_go_on(tmp_path: Path) -> None:
    """In the same experiment its restore passes assert_consumed, and the numbers that are drawn are others."""
    options = on("tensorflow", theirs=True)
    reference, legs, statuses = compared(f"{job('tensorflow')}:train", tmp_path, options, within([12]))
    assert (statuses, begins(legs)[1:]) == ([0, -9, 0], [12])
    with pytest.raises(AssertionError, match="leg 1 differs in loss of step 13"):
        assert_equal(reference, legs)


@slow
@pytest.mark.parametrize("killed", [0, 1])
def test_two_workers_go_on(killed: int, tmp_path: Path) -> None:
    """P73: under a MultiWorkerMirroredStrategy a worker is killed, the chief or the other, and both go on exactly."""
    options = on("tensorflow", killed=killed)
    reference, legs, statuses = compared(f"{job('tensorflow')}:workers", tmp_path, options, within([4, 9]))
    assert statuses == [0, -9, -9, 0]
    assert {"end", "end of the second"} <= {what for what, _, _ in reference}
    assert begins(legs)[0] == 0 < begins(legs)[1] <= 4 < begins(legs)[2] <= 9
    assert_equal(reference, legs)


# Keras on the other backends runs the same code of ours.
EACH = [
    ("jax", ""),
    ("keras", "jax"),
    ("tensorflow", "tensorflow"),
    *(pytest.param("keras", backend, marks=slow) for backend in ("torch", "tensorflow")),
]


@pytest.mark.parametrize(("framework", "backend"), EACH)
def test_the_page_goes_on_bit_for_bit(framework: str, backend: str, tmp_path: Path) -> None:
    """P73: the page's block, killed in a step and started again, ends as it does without a kill."""
    dies = "keras.callbacks.LambdaCallback(on_train_batch_begin=lambda *_, logs=None: leg.within(0))"

    def dying(block: str) -> str:
        if framework == "keras":
            return block.replace("[saving]", f"[saving, {dies}]")
        return f"{block}        ckpt.wait()\n        leg.within(step)\n"

    assert_page_goes_on(f"KERAS.md#{framework}", job(framework), tmp_path, dying, **on(backend))
    one, other = (tmp_path / name / "runs/first" for name in ("reference", "killed"))
    ignored = () if framework == "keras" else ("--ignore", "rng")
    places = [row["place"] for row in ckpt("diff", one, other, *ignored, "--json").data["differences"]]
    # TensorFlow writes equal positions of an iterator in more ways than one.
    assert all(framework == "tensorflow" and place.startswith("train/others/files") for place in places)
