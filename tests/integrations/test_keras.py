"""Keras on torch, JAX and TensorFlow: `fit` is killed, and goes on bit for bit. All of it in processes of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_runs import ckpt, flip
from tests.support.legs import assert_equal, begins, compared, random_moments, within

ROOT = Path(__file__).parents[2]
JOB = "tests.integrations.keras_job:train"
BACKENDS = ("torch", "jax", "tensorflow")
slow = pytest.mark.slow


def on(backend: str, **options: Any) -> dict[str, Any]:
    """Return the options of a job on a backend."""
    return {**options, "environment": {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}}


QUICK = [("torch", {}, [5, 12, 25]), ("jax", {"together": 3}, [6, 12, 27]), ("tensorflow", {}, [5, 12, 25])]
SLOW: list[tuple[str, dict[str, Any], list[int]]] = [
    ("jax", {}, [1, 11, 12, 35]),
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
    call = [sys.executable, "-m", "pytest", "tests/integrations/keras_checks.py", f"--basetemp={tmp_path / 'checks'}"]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run(
        [*call, "-q", "-p", "no:cacheprovider"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.parametrize("backend", ["jax", *(pytest.param(name, marks=slow) for name in ("torch", "tensorflow"))])
def test_the_page_goes_on_bit_for_bit(backend: str, tmp_path: Path) -> None:
    """P73: the page's block, killed in a step and started again, ends as it does without a kill."""
    page = (ROOT / "docs/KERAS.md").read_text(encoding="utf-8")
    block = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    dies = "lambda *_, logs=None, count=itertools.count(): next(count) == 21 and os.kill(os.getpid(), 9)"
    others = f"[saving, keras.callbacks.LambdaCallback(on_train_batch_begin={dies})]"
    killed = f"import itertools, os\n{block}".replace("[saving]", others)
    for name, script, status in (("whole", block, 0), ("killed", killed, -9), ("killed", block, 0)):
        (tmp_path / name).mkdir(exist_ok=True)
        environment = {**os.environ, "KERAS_BACKEND": backend}
        call = [sys.executable, "-c", script]
        done = subprocess.run(call, cwd=tmp_path / name, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    assert ckpt("diff", tmp_path / "whole/runs/first", tmp_path / "killed/runs/first").status == 0
