"""Hugging Face's Trainer: killed, resumed, killed and resumed again, a training ends bit for bit as without a stop."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import open_run
from tests.support.legs import assert_equal, begins, compared

JOB = "tests.integrations.huggingface_job:train"


def test_killed_twice_it_ends_as_without_a_stop(tmp_path: Path) -> None:
    """P73: SIGKILL between gradients and optimizer, in an epoch and in its first step; sums of the loss go on too."""
    reference, legs, statuses = compared(JOB, tmp_path, {"logging": 5}, [7, 24])
    assert statuses == [0, -9, -9, 0]
    assert begins(legs) == [0, 7, 24]
    assert_equal(reference, legs)
    assert set(open_run(str(tmp_path / "killed/run")).find("latest").metrics) == {
        *("loss", "grad_norm", "learning_rate", "eval_loss")
    }


PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0},
    "metric_for_best_model": "loss",
    "greater_is_better": False,
}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
VARIANTS: list[dict[str, Any]] = [
    {"args": {"gradient_accumulation_steps": 4}},
    {"args": {"dataloader_num_workers": 2}},
    {"args": {"bf16": True}},
    {"args": PLATEAU},
    {"args": BEST, "early": True, "their_saves": "epoch"},
    {"stream": True},
    {"stream": True, "args": {"dataloader_num_workers": 2}},
    {"logging": 7, "interval": 4},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_killed_in_every_other_step(options: dict[str, Any], tmp_path: Path) -> None:
    """P14, P19, P20, P73: accumulation, workers, schedules, early stop, the best model and streams go on exactly."""
    last = 9 if "gradient_accumulation_steps" in options.get("args", {}) else 30
    reference, legs, statuses = compared(JOB, tmp_path, options, range(1, last, 2))
    assert statuses[0] == statuses[-1] == 0
    assert_equal(reference, legs)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random(seed: int, tmp_path: Path) -> None:
    """P73: a kill that falls anywhere, in Trainer's start and in a commit too, changes no bit."""
    times = [random.Random(seed).uniform(0.05, 0.9) for _ in range(12)]
    reference, legs, statuses = compared(JOB, tmp_path, {}, [], after_s=times)
    assert statuses[-1] == 0
    assert_equal(reference, [leg for leg in legs if leg])


@pytest.mark.slow
def test_sigterm_ends_after_the_step_with_a_commit(tmp_path: Path) -> None:
    """P69: the step in hand is finished and committed, then the signal has its way."""
    reference, legs, statuses = compared(JOB, tmp_path, {"interval": 100}, [7], number=signal.SIGTERM)
    assert statuses == [0, -15, 0]
    assert begins(legs) == [0, 8]
    assert_equal(reference, legs)


@pytest.mark.slow
def test_a_loop_with_accelerate_goes_on(tmp_path: Path) -> None:
    """P73: what an Accelerator has prepared is saved bare, and goes on bit for bit."""
    reference, legs, statuses = compared(JOB.replace("train", "loop"), tmp_path, {}, [3, 12, 20])
    assert statuses == [0, -9, -9, -9, 0]
    assert begins(legs) == [0, 3, 12, 20]
    assert_equal(reference, legs)
