"""The loops of others: killed, resumed, killed and resumed again, a training ends bit for bit as without a stop."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import open_run
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from tests.support.legs import Lines, Moment, assert_equal, begins, compared, random_moments, within

pytestmark = pytest.mark.framework
JOBS = "tests.integrations"
LIGHTNING = f"{JOBS}.lightning_job:train"
OWN = f"{JOBS}.lightning_job:own"
TRAINER = f"{JOBS}.huggingface_job:train"
ACCELERATE = f"{JOBS}.huggingface_job:loop"
LOADERS = f"{JOBS}.loaders_job:train"
LOOP, TUNED, ACCELERATED = (f"{JOBS}.finetuning_job:{name}" for name in ("loop", "trainer", "accelerated"))
Row = tuple[str, dict[str, Any], list[Moment]]

# What warnings of a program and its state say; others are of a store or a machine that is slow.
OF_PROGRAMS = {"position", "state", "DataLoader", "differ", "settings", "range(N)"}
OF_PROGRAMS |= {"left to train", "not saved", "seed"}

QUICK: list[Row] = [
    # A schedule that needs a metric steps at the end of the epoch in which a training was resumed.
    (LIGHTNING, {"module": "pairs", "loader": "pairs", "plateau": True}, within([5, 17])),
    # A resumed epoch keeps its unfrozen layers, its accumulation and the sums of its torchmetrics.
    (LIGHTNING, {"module": "accumulating", "metric": True, "unfreezing": True}, within([5, 14])),
    # What touches the loaders or draws numbers before the first batch is trained, and what a step leaves behind.
    (LIGHTNING, {"module": "drawing", "loader": "stateful", "workers": 2, "estimates": True}, within([1, 28])),
    (LIGHTNING, {"module": "fetching"}, within([12, 28])),
    (LIGHTNING, {"module": "manual", "late": True, "workers": 2}, within([1, 28])),
    # A stream of datasets, in the first epoch and in the last one.
    (LOADERS, {"over": "stream"}, within([5, 29])),
    # Batches of many sizes.
    (TRAINER, {"args": {"train_sampling_strategy": "batch_rebalance"}}, within([5])),
]
SLOW: list[Row] = [
    (LIGHTNING, {"accumulates": True}, within([5, 14])),
    *((LIGHTNING, options, within([1, 12, 28])) for options in (
        {"estimates": True},
        {"module": "drawing", "workers": 2, "estimates": True},
        {"module": "pairs", "loader": "pairs", "workers": 2, "estimates": True},
        {"module": "accumulating"},
        {"module": "drawing", "loader": "stateful"},
        {"late": True},
    )),
    (ACCELERATE, {}, within([3, 12, 20])),
    # Workers begin with the restore, before the loop can tell the stream its epoch; the second epoch goes on.
    (LOADERS, {"over": "stream", "workers": 2}, within([5, 15, 20, 29])),
]  # fmt: skip
# Ends of epochs and their first batches too. With workers torchdata 0.11 and datasets 5.2 by themselves begin an epoch
# again that is resumed twice in its last batches, and do not resume a shuffled stream.
for _over, _workers in (("dataset", 0), ("dataset", 2), ("stream", 0), ("shards", 0)):
    _drawn = random.Random(_over).sample(range(36), 4)
    SLOW.append((LOADERS, {"over": _over, "workers": _workers}, within(sorted({0, 11, 12, 24, *_drawn}))))

TUNING: list[tuple[str, dict[str, Any]]] = [
    (LOOP, {"adapter": "lora"}),
    (TUNED, {"trainer": "sft", "adapter": "lora"}),
    *((ACCELERATED, {"scaled": scaled}) for scaled in (False, True)),
    *((LOOP, {"adapter": kind}) for kind in ("dora", "ia3", "adalora", "prompt", "two")),
    *((TUNED, {"trainer": "trainer", "adapter": kind}) for kind in ("lora", "dora", "ia3", "prompt")),
    (LOOP, {"adapter": "two", "base": "a/base@1"}),
    (TUNED, {"trainer": "sft", "adapter": "lora", "base": "a/base@1"}),
    (TUNED, {"trainer": "sft"}),
    (TUNED, {"trainer": "sft", "args": {"gradient_accumulation_steps": 2, "max_steps": 9}}),
    (TUNED, {"trainer": "dpo", "adapter": "lora"}),
    (TUNED, {"trainer": "dpo"}),
    (TUNED, {"trainer": "dpo", "args": {"sync_ref_model": True, "ref_model_sync_steps": 2}}),
    (TUNED, {"trainer": "dpo", "args": {"precompute_ref_log_probs": True}}),
    (TUNED, {"trainer": "grpo", "args": {"steps_per_generation": 4}}),
    (TUNED, {"trainer": "grpo", "adapter": "lora", "args": {"num_iterations": 2, "steps_per_generation": 2}}),
    *((LOOP, {"optimizer": f"{kind}schedulefree", "order": order})
      for kind in ("", "radam_", "sgd_") for order in ("before", "after")),
    *((LOOP, {"optimizer": f"bnb_{kind}"}) for kind in ("adamw8bit", "paged", "lion8bit")),
    *((LOOP, {"optimizer": f"ao_{kind}", "environment": {"TORCHDYNAMO_DISABLE": "1"}})
      for kind in ("8bit", "4bit", "fp8")),
]  # fmt: skip


def tuning(number: int, job: str, options: dict[str, Any]) -> Any:
    """Draw two moments: in a step whose predecessors are committed, and in a step or in a save as they come."""
    chance = random.Random(str((job, options)))
    second: list[Moment] = [("steps", chance.randint(1, 4)), ("files", chance.randint(60, 140))]
    moments = [("step", chance.randint(3, 6)), chance.choice(second)]
    marks = [pytest.mark.slow] * (number > 1)
    return pytest.param(job, options, moments, marks=marks)


def warned(leg: Lines) -> list[str]:
    """Return what a leg was warned of that is about its program and state."""
    return [told for what, _, told in leg if what == "warned" and any(one in told for one in OF_PROGRAMS)]


@pytest.mark.parametrize(
    ("job", "options", "moments"),
    [
        *QUICK,
        *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW),
        *(tuning(number, *case) for number, case in enumerate(TUNING)),
    ],
    ids=str,
)
def test_killed_in_some_steps(job: str, options: dict[str, Any], moments: list[Moment], tmp_path: Path) -> None:
    """P16, P19, P23, P25, P73: a start begins exactly where the last one was killed in a step, and no bit differs.

    No line of a program that goes on is a warning.
    """
    reference, legs, statuses = compared(job, tmp_path, options, moments)
    assert statuses == [0, *[-9] * len(moments), 0]
    for (kind, at), begin in zip(moments, begins(legs)[1:], strict=True):
        assert kind != "step" or begin == at
    assert_equal(reference, legs)
    assert [warned(leg) for leg in (reference, *legs)] == [[]] * len(statuses)


PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0},
    "metric_for_best_model": "loss",
    "greater_is_better": False,
}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    (TRAINER, {"args": {"gradient_accumulation_steps": 4}}),
    (TRAINER, {"args": {"dataloader_num_workers": 2}}),
    (TRAINER, {"args": {"train_sampling_strategy": "group_by_length"}}),
    (TRAINER, {"args": {"train_sampling_strategy": "batch_rebalance"}}),
    (TRAINER, {"args": {"bf16": True}}),
    (TRAINER, {"scaled": True, "args": {"gradient_accumulation_steps": 4}}),
    (TRAINER, {"args": PLATEAU}),
    (TRAINER, {"args": BEST, "early": True, "their_saves": "epoch"}),
    (TRAINER, {"stream": True}),
    (TRAINER, {"stream": True, "args": {"dataloader_num_workers": 2}}),
    (TRAINER, {"logging": 7, "interval": 4}),
    (LIGHTNING, {"workers": 2}),
    (LIGHTNING, {"accumulate": 4}),
    (LIGHTNING, {"val": 0.25, "plateau": True}),
    (LIGHTNING, {"val": 5}),
    (LIGHTNING, {"early": True, "plateau": True}),
    (LIGHTNING, {"precision": "bf16-mixed"}),
    (LIGHTNING, {"scaled": True, "accumulate": 2}),
    (LIGHTNING, {"loader": "stateful", "workers": 2, "accumulate": 2}),
    (LIGHTNING, {"loader": "stream", "workers": 2}),
    (LIGHTNING, {"interval": 4}),
]


def steps_of(variant: tuple[str, dict[str, Any]], every: int, marks: Any) -> Any:
    """Strike in every so many steps of a variant."""
    job, options = variant
    few = "accumulate" in options or "gradient_accumulation_steps" in options.get("args", {})
    return pytest.param(
        job, options, within(range(1, 9 if few else 36 if job == LIGHTNING else 30, every)), marks=marks
    )


def of_seed(job: str, seed: int) -> Any:
    own = {"val": 0.5, "ema": seed % 2 == 1} if job == LIGHTNING else {"logging": 1 + seed % 5}
    marks = [pytest.mark.soak] * (seed >= 2)
    return pytest.param(job, {"scaled": True, **own}, random_moments(seed), marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "options", "moments"),
    [
        *(steps_of(variant, *form) for variant in VARIANTS for form in ((10, ()), (2, pytest.mark.soak))),
        *(of_seed(job, seed) for job in (LIGHTNING, TRAINER, ACCELERATE) for seed in range(20)),
        *((OWN, {"epochs": 3, "async": seed == 1}, random_moments(seed, 12)) for seed in range(2)),
    ],
)
def test_killed_in_many_steps(job: str, options: dict[str, Any], moments: list[Moment], tmp_path: Path) -> None:
    """P14, P16, P19, P20, P73: schedules, scaler, accumulation, averages, early stop and loaders go on exactly.

    Killed at random too: in steps, in saves and anywhere, in a framework's start, and in a removal of ModelCheckpoint.
    """
    reference, legs, statuses = compared(job, tmp_path, options, moments)
    assert statuses[0] == statuses[-1] == 0
    assert -9 in statuses
    assert_equal(*([x for x in reference if x[0] != "held"], [[x for x in leg if x[0] != "held"] for leg in legs]))


def test_lightning_killed_in_a_save_ends_as_without_a_stop(tmp_path: Path) -> None:
    """P16, P73: SIGKILL in an epoch, in a save and in an epoch's first step: scaler, averages and streams are equal.

    A training that has ended ends the same when it is started again.
    """
    moments: list[Moment] = [("step", 5), ("files", 200), ("step", 24), ("steps", 36)]
    reference, legs, statuses = compared(LIGHTNING, tmp_path, {"scaled": True, "ema": True}, moments)
    assert statuses == [0, -9, -9, -9, 0, 0]
    *legs, ended = legs
    first, second, third, last = begins(legs)
    assert (first, second, last) == (0, 5, 24)
    assert 5 <= third < 24
    assert_equal(reference, legs)
    assert [line for line in ended if line[0] != "warned"] == reference[-2:]
    assert set(open_run(str(tmp_path / "killed/run")).find("latest").metrics) >= {"loss", "loss_epoch", "val"}


@pytest.mark.parametrize(
    "options", [{"every": 6, "estimates": True}, pytest.param({"epochs": 3}, marks=pytest.mark.slow)], ids=str
)
def test_lightnings_own_checkpoints_are_ours(options: dict[str, Any], tmp_path: Path) -> None:
    """P73: ModelCheckpoint and `ckpt_path="last"` alone, killed twice: weights and moments are equal; all verifies."""
    # Not an epoch's last batch: resumed there, Lightning 2.6 trains other batches, with files of its own too.
    stops = [6, 9] if "every" in options else [2, 7, 14, 29]
    reference, legs, statuses = compared(OWN, tmp_path, options, within(stops))
    assert statuses == [0, *[-9] * len(stops), 0]
    assert begins(legs) == ([0, 6, 6] if "every" in options else [0, *stops])
    assert_equal(reference, legs)
    for one in (tmp_path / "killed/own").iterdir():
        faults = verify_run_directory(open_run(str(one)).history)
        assert (faults.good, faults.orphans) == (True, ())


def test_lightnings_switches_read_a_run_of_the_callback(tmp_path: Path) -> None:
    """`test(ckpt_path=run)`, `run@6` and `fit(ckpt_path=run)` work as with a file; what cannot be stored is named."""
    reference, _, _ = compared(f"{JOBS}.lightning_job:evaluated", tmp_path, {}, [])
    found = {(what, step): value for what, step, value in reference}
    assert found["test", 12] == found["test of the live one", 12] != found["test", 6]
    assert found["trained", 12] == ""
    assert [found["moments", n] for n in range(6)] == ["True"] * 6
    assert "cannot be stored (at lightning/hyper_parameters/make)" in found["refused", 0]
    # A path has its name once it has its checkpoint: Lightning goes on from what it finds.
    assert found["left", 0] == "[]"
    assert "WeightAveraging or EMAWeightAveraging" in found["averaging", 0]
    assert "not saved by CkptCheckpointIO" in found["kept", 0]


def test_a_trainer_and_a_loop_killed_in_a_save_end_as_without_a_stop(tmp_path: Path) -> None:
    """P16, P73: SIGKILL in a step, in a save and in a loop with accelerate: losses, scaler and streams are equal.

    A step that the scaler skips is not one that diverges. A training that has ended ends the same when it is started
    again, for the loop that follows it was killed: it was an earlier phase, and no line is a warning.
    """
    options = {"logging": 5, "scaled": True, "epochs": 2, "args": {"logging_first_step": True}}
    moments: list[Moment] = [("step", 7), ("files", 250), ("step", 30)]
    reference, legs, statuses = compared(f"{JOBS}.huggingface_job:both", tmp_path, options, moments)
    assert statuses == [0, -9, -9, -9, 0]
    first, second, third, last = begins(legs)
    assert (first, second, last) == (0, 7, 24)
    assert 7 <= third < 24
    (norm,) = (value for what, step, value in reference if (what, step) == ("grad_norm", 1))
    assert norm in {"inf", "nan"}
    assert [step for what, step, _ in legs[-1] if what == "begin of the loop"] == [30]
    assert_equal(reference, legs)
    metrics = open_run(str(tmp_path / "killed/run")).find("latest").metrics
    assert metrics.keys() == {"loss", "grad_norm", "learning_rate", "eval_loss"}
    assert [warned(leg) for leg in (reference, *legs)] == [[]] * 5


def test_trainers_own_switch_counts_until_the_run_has_a_checkpoint(tmp_path: Path) -> None:
    """`resume_from_checkpoint`: its path is where a new run goes on; later the run wins over torn and missing ones."""
    options = {"their_saves": "steps", "args": {"save_steps": 10}, "logging": 5}
    job = f"{JOBS}.huggingface_job:switched"
    reference, legs, statuses = compared(job, tmp_path, options, within([15, 22]))
    assert statuses == [0, -9, -9, 0]
    assert begins(legs) == [10, 15, 22]
    compared_names = {"loss", "eval_loss", "grad_norm", "learning_rate", "end"}  # its train_loss is that of one call
    (refused, *values), lines = reference, [line for leg in legs for line in leg if line[0] in compared_names]
    assert "has a checkpoint to resume from" in refused[2]
    assert [line for line in lines if line not in values] == []
    assert {step for what, step, _ in lines if what == "loss"} == {15, 20, 25, 30, 35}
    assert lines[-1][0] == "end"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("job", "status"), [(LIGHTNING, 0), pytest.param(TRAINER, -15, marks=pytest.mark.slow)]
)  # Lightning raises SystemExit
def test_a_signal_ends_after_the_step_with_a_commit(
    job: str, status: int, number: signal.Signals, tmp_path: Path
) -> None:
    """P69: the step in hand is finished and committed, and the framework ends as it does after a SIGTERM.

    So it does at the signal that Slurm sends before it ends a job.
    """
    reference, legs, statuses = compared(job, tmp_path, {"interval": 100}, within([7]), number=number)
    assert statuses == [0, status, 0]
    assert begins(legs) == [0, 8]
    assert_equal(reference, legs)


@pytest.mark.slow
def test_two_ranks_with_lightnings_own_checkpoints_go_on(tmp_path: Path) -> None:
    """P73: ModelCheckpoint alone, under DDP: the first rank is killed, and both go on bit for bit."""
    reference, legs, statuses = compared(f"{JOBS}.lightning_job:ranks", tmp_path, {}, within((3, 8)))
    assert statuses == [0, -9, -9, 0]
    assert begins(legs)[0] == 0 < begins(legs)[1] <= 3 < begins(legs)[2] <= 8
    assert_equal(reference, legs)
