"""The libraries that people fine-tune with: killed twice at random, a training ends bit for bit as without a stop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.legs import Moment, assert_equal, compared

for _name in ("peft", "trl", "bitsandbytes", "schedulefree", "torchao"):
    pytest.importorskip(_name)

LOOP = "tests.integrations.finetuning_job:loop"
TRAINER = "tests.integrations.finetuning_job:trainer"
ACCELERATED = "tests.integrations.finetuning_job:accelerated"
Case = tuple[str, dict[str, Any]]

QUICK: list[Case] = [
    (LOOP, {"adapter": "lora"}),
    (TRAINER, {"trainer": "sft", "adapter": "lora"}),
]
SLOW: list[Case] = [
    *((ACCELERATED, {"scaled": scaled}) for scaled in (False, True)),
    *((LOOP, {"adapter": kind}) for kind in ("dora", "ia3", "adalora", "prompt", "two")),
    *((TRAINER, {"trainer": "trainer", "adapter": kind}) for kind in ("lora", "dora", "ia3", "prompt")),
    (LOOP, {"adapter": "two", "base": "a/base@1"}),
    (TRAINER, {"trainer": "sft", "adapter": "lora", "base": "a/base@1"}),
    (TRAINER, {"trainer": "sft"}),
    (TRAINER, {"trainer": "sft", "args": {"gradient_accumulation_steps": 2, "max_steps": 9}}),
    (TRAINER, {"trainer": "dpo", "adapter": "lora"}),
    (TRAINER, {"trainer": "dpo"}),
    (TRAINER, {"trainer": "dpo", "args": {"sync_ref_model": True, "ref_model_sync_steps": 2}}),
    (TRAINER, {"trainer": "dpo", "args": {"precompute_ref_log_probs": True}}),
    (TRAINER, {"trainer": "grpo", "args": {"steps_per_generation": 4}}),
    (TRAINER, {"trainer": "grpo", "adapter": "lora", "args": {"num_iterations": 2, "steps_per_generation": 2}}),
    *((LOOP, {"optimizer": f"{kind}schedulefree", "order": order})
      for kind in ("", "radam_", "sgd_") for order in ("before", "after")),
    *((LOOP, {"optimizer": f"bnb_{kind}"}) for kind in ("adamw8bit", "paged", "lion8bit")),
    *((LOOP, {"optimizer": f"ao_{kind}", "environment": {"TORCHDYNAMO_DISABLE": "1"}})
      for kind in ("8bit", "4bit", "fp8")),
]  # fmt: skip


def two(case: Case) -> list[Moment]:
    """Draw two moments: in a step whose predecessors are committed, and in a step or in a save as they come."""
    chance = random.Random(str(case))
    second: list[Moment] = [("steps", chance.randint(1, 4)), ("files", chance.randint(60, 140))]
    return [("step", chance.randint(3, 6)), chance.choice(second)]


@pytest.mark.parametrize(
    ("job", "options"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_killed_twice_at_random(job: str, options: dict[str, Any], tmp_path: Path) -> None:
    """P16, P73: killed twice by SIGKILL, what is logged, weights, moments and random streams are those without a kill.

    No start is warned of anything, or told of settings that the restore replaced.
    """
    moments = two((job, options))
    reference, legs, statuses = compared(job, tmp_path, options, moments)
    assert statuses == [0, -9, -9, 0]
    assert next(step for what, step, _ in legs[1] if what == "begin") == moments[0][1]
    assert_equal(reference, legs)
    assert [line for leg in (reference, *legs) for line in leg if line[0].startswith("warned")] == []
