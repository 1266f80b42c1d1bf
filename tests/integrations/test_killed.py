"""The loops of others: killed, resumed, killed and resumed again, a training ends bit for bit as without a stop."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.legs import Lines, assert_equal, begins, compared, random_moments, within

LIGHTNING = "tests.integrations.lightning_job:train"
TRAINER = "tests.integrations.huggingface_job:train"
ACCELERATE = "tests.integrations.huggingface_job:loop"
LOADERS = "tests.integrations.loaders_job:train"
Row = tuple[str, dict[str, Any], list[int]]

# What warnings of a program and its state say; others are of a store or a machine that is slow.
OF_PROGRAMS = {"position", "state", "DataLoader", "differ", "settings", "range(N)"}
OF_PROGRAMS |= {"left to train", "not saved", "seed"}

QUICK: list[Row] = [
    # A schedule that needs a metric steps at the end of the epoch in which a training was resumed.
    (LIGHTNING, {"plateau": True}, [5, 17]),
    # A resumed epoch keeps its unfrozen layers, its accumulation and the sums of its torchmetrics.
    (LIGHTNING, {"metric": True, "unfreezing": True}, [5, 14]),
    # What touches the loaders or draws numbers before the first batch is trained, and what a step leaves behind.
    (LIGHTNING, {"module": "drawing", "loader": "stateful", "workers": 2, "estimates": True}, [1, 28]),
    (LIGHTNING, {"module": "pairs", "loader": "pairs"}, [1, 28]),
    (LIGHTNING, {"module": "fetching"}, [12, 28]),
    (LIGHTNING, {"module": "manual", "late": True, "workers": 2}, [1, 28]),
    (LIGHTNING, {"module": "accumulating"}, [1, 28]),
    # A stream of datasets, in the first epoch and in the last one.
    (LOADERS, {"over": "stream"}, [5, 29]),
]
SLOW: list[Row] = [
    (LIGHTNING, {"accumulates": True}, [5, 14]),
    (LIGHTNING, {"estimates": True}, [1, 12, 28]),
    (LIGHTNING, {"estimates": True, "loader": "stateful", "workers": 2}, [1, 12, 28]),
    (LIGHTNING, {"module": "drawing", "workers": 2, "estimates": True}, [1, 12, 28]),
    (LIGHTNING, {"module": "pairs", "loader": "pairs"}, [1, 12, 28]),
    (LIGHTNING, {"module": "manual", "late": True, "workers": 2}, [1, 12, 28]),
    (LIGHTNING, {"module": "accumulating"}, [1, 12, 28]),
    (LIGHTNING, {"module": "drawing"}, [1, 12, 28]),
    (LIGHTNING, {"module": "drawing", "loader": "stateful"}, [1, 12, 28]),
    (LIGHTNING, {"module": "pairs", "loader": "pairs", "workers": 2, "estimates": True}, [1, 12, 28]),
    (LIGHTNING, {"module": "manual"}, [1, 12, 28]),
    (LIGHTNING, {"late": True}, [1, 12, 28]),
    (ACCELERATE, {}, [3, 12, 20]),
    # Workers begin with the restore, before the loop can tell the stream its epoch; the second epoch goes on.
    (LOADERS, {"over": "stream", "workers": 2}, [5, 15, 20, 29]),
]
# Ends of epochs and their first batches too. With workers torchdata 0.11 and datasets 5.2 by themselves begin an epoch
# again that is resumed twice in its last batches, and do not resume a shuffled stream.
for _over, _workers in (("dataset", 0), ("dataset", 2), ("stream", 0), ("shards", 0)):
    _drawn = random.Random(_over).sample(range(36), 4)
    SLOW.append((LOADERS, {"over": _over, "workers": _workers}, sorted({0, 11, 12, 24, *_drawn})))


def warned(leg: Lines) -> list[str]:
    """Return what a leg was warned of that is about its program and state."""
    return [told for what, _, told in leg if what == "warned" and any(one in told for one in OF_PROGRAMS)]


@pytest.mark.parametrize(
    ("job", "options", "stops"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)], ids=str
)
def test_killed_in_some_steps(job: str, options: dict[str, Any], stops: list[int], tmp_path: Path) -> None:
    """P16, P19, P23, P25, P73: each start begins exactly where the last one was killed, and no bit differs.

    No line of a program that goes on is a warning.
    """
    reference, legs, statuses = compared(job, tmp_path, options, within(stops))
    assert statuses == [0, *[-9] * len(stops), 0]
    assert begins(legs)[1:] == stops
    assert_equal(reference, legs)
    assert [warned(leg) for leg in (reference, *legs)] == [[]] * (len(stops) + 2)


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
    (LIGHTNING, {"ema": True}),
    (LIGHTNING, {"precision": "bf16-mixed"}),
    (LIGHTNING, {"scaled": True, "accumulate": 2}),
    (LIGHTNING, {"loader": "stateful"}),
    (LIGHTNING, {"loader": "stateful", "workers": 2, "accumulate": 2}),
    (LIGHTNING, {"loader": "stream"}),
    (LIGHTNING, {"loader": "stream", "workers": 2}),
    (LIGHTNING, {"interval": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("job", "options"), VARIANTS, ids=str)
def test_killed_in_every_other_step(job: str, options: dict[str, Any], tmp_path: Path) -> None:
    """P14, P16, P19, P20, P73: schedules, scaler, accumulation, averages, early stop and loaders go on exactly."""
    few = "accumulate" in options or "gradient_accumulation_steps" in options.get("args", {})
    last = 9 if few else 36 if job == LIGHTNING else 30
    reference, legs, statuses = compared(job, tmp_path, options, within(range(1, last, 2)))
    assert statuses[0] == statuses[-1] == 0
    assert_equal(reference, legs)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("job", [LIGHTNING, TRAINER, ACCELERATE])
def test_killed_at_random(job: str, seed: int, tmp_path: Path) -> None:
    """P16, P73: kills in steps, in saves and anywhere, in a framework's start too, change no bit.

    Schedule, scaler, averages of weights (the framework's and one's own), means of epochs, position in the data and
    random streams are in the state.
    """
    own = {"val": 0.5, "ema": seed % 2 == 1} if job == LIGHTNING else {"logging": 1 + seed % 5}
    reference, legs, statuses = compared(job, tmp_path, {"scaled": True, **own}, random_moments(seed))
    assert statuses[-1] == 0
    assert -9 in statuses
    assert_equal(reference, legs)


@pytest.mark.parametrize(
    ("job", "status"), [(LIGHTNING, 0), pytest.param(TRAINER, -15, marks=pytest.mark.slow)]
)  # Lightning raises SystemExit
def test_sigterm_ends_after_the_step_with_a_commit(job: str, status: int, tmp_path: Path) -> None:
    """P69: the step in hand is finished and committed, and the framework ends as it does after a SIGTERM."""
    reference, legs, statuses = compared(job, tmp_path, {"interval": 100}, within([7]), number=signal.SIGTERM)
    assert statuses == [0, status, 0]
    assert begins(legs) == [0, 8]
    assert_equal(reference, legs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "options", "stops"),
    [
        ("lightning_job", {"killed": 0}, (3, 8)),  # with Lightning's own checkpoints
        ("lightning_job", {"killed": 1, "callback": True}, (3, 8)),
        ("huggingface_job", {"killed": 0}, (4, 9)),
        ("huggingface_job", {"killed": 1, "logging": 4}, (4, 9)),
        ("huggingface_job", {"killed": 1, "loop": True}, (4, 9)),  # with accelerate
    ],
    ids=str,
)
def test_two_ranks_go_on(module: str, options: dict[str, Any], stops: tuple[int, int], tmp_path: Path) -> None:
    """P73: under DDP a rank is killed, and both go on bit for bit."""
    reference, legs, statuses = compared(f"tests.integrations.{module}:ranks", tmp_path, options, within(stops))
    assert statuses == [0, -9, -9, 0]
    assert begins(legs)[0] == 0 < begins(legs)[1] <= stops[0] < begins(legs)[2] <= stops[1]
    assert_equal(reference, legs)
    assert module == "lightning_job" or {"end", "end of rank 1"} <= {what for what, _, _ in reference}


QUIET: list[tuple[str, dict[str, Any]]] = [
    (TRAINER, {"epochs": 2}),
    (LOADERS, {"over": "ours"}),
    (LIGHTNING, {"ema": True}),
    (LOADERS, {"over": "dataset"}),
    (LIGHTNING, {"loader": "stateful"}),
]
# Programs that are killed in some steps, above, are warned of nothing either.
QUIETLY = [
    pytest.param(*row, workers, marks=[] if n < 1 and workers else pytest.mark.slow)
    for n, row in enumerate(QUIET)
    for workers in (0, 2)
]


@pytest.mark.parametrize(("job", "options", "workers"), QUIETLY, ids=str)
def test_a_right_program_is_warned_of_nothing(job: str, options: dict[str, Any], workers: int, tmp_path: Path) -> None:
    """Killed and resumed with and without workers, in each framework, no line of a program that goes on is a warning.

    Started once more, the finished ones of Lightning and Hugging Face are told that nothing was left.
    """
    options = {**options, "workers": workers, "args": {"dataloader_num_workers": workers}}
    reference, legs, statuses = compared(job, tmp_path, options, [("step", 5), ("step", 17), ("step", 100)])
    assert statuses == [0, -9, -9, 0, 0]
    *going_on, again = (warned(leg) for leg in (reference, *legs))
    assert going_on == [[]] * 4
    assert all("left to train" in told for told in again)
    assert len(again) == (job != LOADERS)
