"""Keras on torch, JAX and TensorFlow: `fit` is killed, and goes on bit for bit. All of it in processes of its own."""

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

MODULE = "tests.integrations.keras_job"
JOB = f"{MODULE}:train"
BACKENDS = ("torch", "jax", "tensorflow")
slow = pytest.mark.slow


def on(backend: str, **options: Any) -> dict[str, Any]:
    """Return the options of a job on a backend."""
    return {**options, "environment": {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}}


QUICK = [("torch", {}, [12, 25]), ("tensorflow", {}, [5, 25]), ("jax", {"together": 3}, [12, 27])]
SLOW: list[tuple[str, dict[str, Any], list[int]]] = [
    ("jax", {}, [1, 11, 12, 35]),
    ("jax", {"together": 3}, [6, 12, 27]),
    ("tensorflow", {}, [5, 12, 25]),
    ("tensorflow", {"together": 3}, [6, 12, 27]),
    *((backend, {"schedule": True, "workers": 2}, [1, 13, 24]) for backend in BACKENDS),
    *((backend, {"accumulate": 2}, [1, 14, 23]) for backend in BACKENDS),
    ("jax", {"together": 5}, [5, 12, 29]),  # the last execution of an epoch is short
    ("tensorflow", {"together": 5}, [5, 12, 29]),
]


@pytest.mark.parametrize(
    ("backend", "options", "stops"), [*QUICK, *(pytest.param(*row, marks=slow) for row in SLOW)], ids=str
)
def test_killed_in_some_steps(backend: str, options: dict[str, Any], stops: list[int], tmp_path: Path) -> None:
    """P16, P19, P20, P23, P25, P73: losses, metrics, means of epochs, numbers drawn and all variables are equal."""
    reference, legs, statuses = compared(JOB, tmp_path, on(backend, **options), within(stops))
    assert statuses == [0, *[-9] * len(stops), 0]
    assert begins(legs)[1:] == stops
    assert_equal(reference, legs)
    assert [told for leg in (reference, *legs) for what, _, told in leg if what == "warned" and "saved" in told] == []
    run = tmp_path / "killed/run"
    groups = {row["name"]: row["kind"] for row in ckpt("show", run, "--json").data["groups"]}
    assert groups == {**dict.fromkeys(("model", "optimizer", "seeds", "metrics", "data"), "stateful"), "rng": "rng"}
    assert ckpt("diff", run, tmp_path / "reference/run").status == 0
    flip(max(run.glob("checkpoint_*/*/model-*.safetensors")), -1)
    assert ckpt("verify", run).status != 0


@slow
@pytest.mark.parametrize("seed", range(12))
def test_killed_at_random(seed: int, tmp_path: Path) -> None:
    """P16, P73: kills in steps, in saves and anywhere, in Keras's start too, change no bit."""
    options = on(BACKENDS[seed % 3], interval=1 + seed % 4, schedule=seed % 2 == 0)
    reference, legs, statuses = compared(JOB, tmp_path, options, random_moments(seed))
    assert statuses[-1] == 0
    assert -9 in statuses
    assert_equal(reference, legs)


@pytest.mark.parametrize("backend", ["jax", *(pytest.param(name, marks=slow) for name in ("torch", "tensorflow"))])
def test_the_checks_of_restores(backend: str, tmp_path: Path) -> None:
    """Every test of keras_checks.py passes."""
    checks = ["tests/integrations/keras_checks.py", str(tmp_path / "checks")]
    hosted(MODULE, on(backend)["environment"], check, checks, tmp_path / "said")


@pytest.mark.parametrize("backend", ["jax", *(pytest.param(name, marks=slow) for name in ("torch", "tensorflow"))])
def test_the_page_goes_on_bit_for_bit(backend: str, tmp_path: Path) -> None:
    """P73: the page's block, killed in a step and started again, ends as it does without a kill."""
    dies = "keras.callbacks.LambdaCallback(on_train_batch_begin=lambda *_, logs=None: leg.within(0))"

    def dying(block: str) -> str:
        return block.replace("[saving]", f"[saving, {dies}]")

    assert_page_goes_on("KERAS.md", MODULE, tmp_path, dying, **on(backend))
    assert ckpt("diff", tmp_path / "reference/runs/first", tmp_path / "killed/runs/first").status == 0
