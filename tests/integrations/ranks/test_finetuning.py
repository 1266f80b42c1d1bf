"""TRL's trainers, and all that accelerate prepares, in two ranks: killed twice they end as without a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ranks.checks import killed_twice

pytestmark = pytest.mark.framework
slow = pytest.mark.slow
JOB = "tests.integrations.finetuning_job:ranks"
STOPS = [5, 9]


@pytest.mark.parametrize(
    "options",
    [
        {"trainer": "grpo", "args": {"steps_per_generation": 4}},
        *(
            pytest.param(options, marks=slow)
            for options in (
                {"trainer": "grpo", "adapter": "lora", "args": {"num_iterations": 2, "steps_per_generation": 2}},
                {"trainer": "sft"},
                {"trainer": "sft", "adapter": "lora", "base": "a/base@1"},
                {"trainer": "dpo"},
                {"trainer": "dpo", "adapter": "lora"},
                {"trainer": "dpo", "args": {"sync_ref_model": True, "ref_model_sync_steps": 2}},
                {"scaled": False},
                {"scaled": True},
            )
        ),
    ],
    ids=str,
)
def test_two_ranks_end_as_without_a_stop(options: dict[str, Any], tmp_path: Path) -> None:
    """P73: killed twice, generations that are used again, references, losses and moments are those of no kill."""
    reference, _ = killed_twice(JOB, tmp_path, options, STOPS)
    assert {"end", "end of rank 1"} <= {what for what, _, _ in reference}
