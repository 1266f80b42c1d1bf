"""Trainer, TRL, accelerate and Lightning in ranks, DDP and sharded: killed twice they go on, on any number of ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ranks.checks import begun_otherwise, by_step, killed_twice, sampled_otherwise
from tests.support.legs import begins, compared, within
from tests.support.sweeps import sparse

pytestmark = pytest.mark.framework
slow = pytest.mark.slow
JOB = "tests.integrations.ranks.huggingface_job:ranks"
LIGHTNING = "tests.integrations.ranks.lightning_job:ranks"
TUNING = "tests.integrations.finetuning_job:ranks"
FSDP2 = {"fsdp": "full_shard", "fsdp_config": {"version": 2}}
STOPS = [4, 6]  # the second one after an evaluation, which leaves parameters gathered
ALIKE: dict[str, list[dict[str, Any]]] = {
    JOB: [
        {"args": FSDP2},
        {"loop": True, "sharded": True},
        {},
        {"loop": True},
        {"args": {**FSDP2, "fp16": True}},
        {"args": FSDP2, "accumulates": 2},
        {"args": FSDP2, "adapter": True},
        {"args": FSDP2, "adapter": True, "base": "a/base@1"},
    ],
    LIGHTNING: [
        {"strategy": "fsdp2", "manual": True},  # gradients are state
        *({"strategy": strategy} for strategy in ("fsdp2", "ddp", "tp", "both")),
    ],
    TUNING: [
        {"trainer": "grpo", "args": {"steps_per_generation": 4}},  # generations are used again
        {"trainer": "grpo", "adapter": "lora", "args": {"num_iterations": 2, "steps_per_generation": 2}},
        {"trainer": "sft"},
        {"trainer": "sft", "adapter": "lora", "base": "a/base@1"},
        {"trainer": "dpo"},
        {"trainer": "dpo", "adapter": "lora"},
        {"trainer": "dpo", "args": {"sync_ref_model": True, "ref_model_sync_steps": 2}},
        *({"scaled": scaled} for scaled in (False, True)),  # all that accelerate prepares
    ],
}
OTHERWISE: dict[str, list[dict[str, Any]]] = {
    JOB: [
        {"args": FSDP2, "then": [3, 1]},
        {"args": FSDP2, "then": [1, 4]},
        {"args": FSDP2, "accumulates": 2, "then": [3, 1]},
        {"args": FSDP2, "then": [4, 3], "adapter": True, "base": "a/base@1"},
        {"args": {**FSDP2, "fp16": True}, "then": [3, 3]},
        *({"then": then} for then in ([3, 1], [1, 4])),
        {"then": [4, 3], "args": {"accelerator_config": {"use_seedable_sampler": False}}},
        *({"loop": True, "then": then} for then in ([3, 1], [1, 4])),
        *({"loop": True, "sharded": True, "then": then} for then in ([3, 1], [1, 4])),
    ],
    LIGHTNING: [
        {"strategy": "fsdp2", "then": [3, 1]},
        {"strategy": "fsdp2", "then": [1, 4]},
        {"strategy": "fsdp2", "then": [3, 1], "manual": True},
        *({"strategy": "ddp", "then": then} for then in ([3, 1], [1, 4])),
        {"strategy": "tp", "then": [1, 3]},
        *({"strategy": "both", "then": then} for then in ([4, 2], [2, 4])),
    ],
}


def first_of_each(rows: dict[str, list[dict[str, Any]]], every: int = 1) -> list[Any]:
    """Give each job with its options; all but the first of each are slow, and `make test-all` has every `every`-th."""
    jobs = [[(job, one) for one in options] for job, options in rows.items()]
    return [row for one in jobs for row in sparse(one, every, one[:1])]


@pytest.mark.parametrize(("job", "options"), first_of_each(ALIKE, 2), ids=str)
def test_two_ranks_end_as_without_a_stop(job: str, options: dict[str, Any], tmp_path: Path) -> None:
    """P73: killed twice, every loss, mean, sample and bit of weights and moments is that of a training without a kill.

    So are generations that are used again, and references.
    """
    reference, legs = killed_twice(job, tmp_path, options, [5, 9] if job == TUNING else STOPS)
    assert [begun_otherwise(reference, *pair) for pair in pairwise(legs)] == [[], []]
    assert {value for what, _, value in reference if what.startswith("idle")} <= {"0"}  # no save makes a step
    assert job != TUNING or {"end", "end of rank 1"} <= {what for what, _, _ in reference}


@pytest.mark.parametrize(("job", "options"), first_of_each(OTHERWISE, 2), ids=str)
def test_another_number_of_ranks_goes_on(job: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Another number of ranks begins with the same weights and moments, and trains on with exactly the next samples."""
    reference, legs, statuses = compared(job, tmp_path, options, within(STOPS))
    assert (statuses, begins(legs)) == ([0, -9, -9, 0], [0, *STOPS])
    assert [begun_otherwise(reference, *pair) for pair in pairwise(legs)] == [[], []]
    assert [sampled_otherwise(reference, leg) for leg in legs] == [[], [], []]


def test_a_logged_loss_is_the_mean_of_all_its_steps(tmp_path: Path) -> None:
    """A mean over steps that 2, 3 and 4 ranks have trained is that of 2 ranks."""
    reference, legs, _ = compared(JOB, tmp_path, {"frozen": True, "then": [3, 4]}, within([2, 5]))
    whole, *parts = (
        {(what, step): float.fromhex(str(value)) for what, step, value in lines if what == "loss"}
        for lines in (reference, *legs)
    )
    assert [{step for _, step in one} for one in parts] == [set(), {4}, {8, 12, 16}]
    assert parts[1] | parts[2] == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"args": {"train_sampling_strategy": "group_by_length"}}, "12 samples in a step on 3 ranks than with 12 on 2"),
        pytest.param({"sums": True}, "was 2 and is now 3, and each rank has its own own_sums", marks=slow),
    ],
    ids=str,
)
def test_what_cannot_be_divided_is_refused(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    """An order that depends on the number of ranks, and sums of a class that differ by rank, end with their names."""
    _, legs, _ = compared(JOB, tmp_path, {**options, "then": [3]}, within([4]))
    assert {why in value for what, _, value in legs[-1] if what.startswith("refused")} == {True}


@slow
def test_samples_that_come_twice_are_said(tmp_path: Path) -> None:
    """Three ranks with as many samples each as two had: the warning names the samples that are trained twice."""
    reference, legs, _ = compared(JOB, tmp_path, {"each": 6, "then": [3]}, within([8]))
    begin = begins(legs)[1]
    (told,) = (value for what, _, value in legs[1] if what == "warned" and "trained twice" in value)
    assert begin == 8
    assert "the samples 18 to 23 of the epoch's order are trained twice" in told
    trained, before, after = by_step(legs[1], "samples")[8], *(by_step(reference, "samples")[n] for n in (7, 8))
    assert {*after} < {*trained}
    assert {*trained} - {*after} < {*before}
