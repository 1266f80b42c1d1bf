"""Metrics that are NaN or infinite: warned of, or the end of training; and what else a metric or a step may be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import CheckpointNotFoundError, NonFiniteError, StateError
from tests.support.sweeps import quick_first

NAN, INF = float("nan"), float("inf")


def opened(directory: Path, **options: Any) -> Checkpointer:
    return Checkpointer(CheckpointConfig(checkpoint_dir=str(directory), max_num_checkpoints=None, **options))


def state() -> dict[str, Any]:
    return {"w": torch.zeros(2)}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_stretch_of_bad_steps_is_one_warning(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P20: a NaN is named with its step and metric, once until every metric is a number again; training goes on."""
    losses = [1.0, NAN, NAN, INF, 0.5, 0.4, -INF]
    with opened(run_dir, step_interval=1) as ckpt:
        for step, loss in enumerate(losses, start=1):
            assert ckpt.step(step, state(), metrics={"loss": loss, "lr": 0.1})
            ckpt.step(step, state(), metrics={})
    said = warnings_of(caplog)
    assert [text.partition(";")[0] for text in said] == ["Step 2: loss is nan", "Step 7: loss is -inf"]


@pytest.mark.parametrize(
    ("verb", "bad"),
    quick_first(product(["step", "save"], [np.float32("nan"), torch.tensor(INF, requires_grad=True)]), 3),
)
def test_stop_raises_before_the_commit(run_dir: Path, verb: str, bad: Any) -> None:
    """P20: with "stop" the step is not saved, in a due step, in one that is not, in a save; those before it stand."""
    for interval in (1, 100):
        with opened(run_dir / str(interval), step_interval=interval, on_non_finite="stop") as ckpt:
            ckpt.save(1, state(), metrics={"loss": 1.0})
            with pytest.raises(NonFiniteError, match="loss is ") as caught:
                getattr(ckpt, verb)(2, state(), metrics={"loss": bad, "lr": 0.1})
            assert (caught.value.step, caught.value.key) == (2, "loss")
            assert ckpt.position == 1
        assert [one.step for one in open_run(str(run_dir / str(interval))).checkpoints()] == [1]


def test_a_checkpoint_with_a_bad_metric_is_never_the_best(run_dir: Path) -> None:
    """P67: neither retention nor the name "best" takes one whose loss was NaN when its other metric was good."""
    with opened(run_dir, best_metric="accuracy", best_mode="max") as ckpt:
        ckpt.save(1, state(), metrics={"accuracy": 0.5, "loss": 1.0})
        ckpt.save(2, state(), metrics={"accuracy": 0.9, "loss": NAN})
        ckpt.save(3, state(), metrics={"accuracy": INF, "loss": 1.0})
    run = open_run(str(run_dir))
    assert run.find("best").step == 1
    with opened(run_dir.with_name("bad"), best_metric="loss") as ckpt:
        ckpt.save(1, state(), metrics={"loss": NAN})
    with pytest.raises(CheckpointNotFoundError):
        open_run(str(run_dir.with_name("bad"))).find("best")


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_a_numpy_integer_is_a_step(run_dir: Path, kind: Any) -> None:
    """A step from a NumPy range is the int that it stands for; a bool, a float and a text are no steps."""
    with opened(run_dir) as ckpt:
        assert type(ckpt.save(kind(3), state()).step) is int
        assert ckpt.position == 3
        for odd in (True, np.True_, 4.0, "4", None, torch.tensor(4.5), -1):
            with pytest.raises(StateError, match="a step is a whole number"):
                ckpt.step(odd, state())  # type: ignore[arg-type]


def loop(ckpt: Checkpointer, bad: Callable[[int, int], bool], total: int) -> tuple[dict[str, Any], list[int]]:
    """Train, and restore where a loss is bad, as `bad` says of a step and the rollbacks so far; return the restores."""
    live: dict[str, Any] = {"w": torch.zeros(()), "n": 0}
    restores = [ckpt.restore(live)]
    step = restores[0]
    while step < total:
        live["w"] += 1
        live["n"] += 1
        try:
            ckpt.step(step + 1, live, metrics={"loss": NAN if bad(step + 1, len(restores) - 1) else 1.0})
        except NonFiniteError as error:
            if not error.rolls_back:  # a flow would not try again
                raise
            restores.append(step := ckpt.restore(live))
            continue
        ckpt.wait()  # a newer snapshot may take the place of one that waits
        step += 1
    return live, restores


def notes_of(directory: Path) -> list[tuple[int, int]]:
    history = open_run(str(directory)).history
    events = [history.read_entry(n)[0].event for n in range(history.head().next_n)]
    return [(event["step"], event["failed"]) for event in events if event.get("note") == "rollback"]


def test_a_rollback_goes_further_back_each_time_until_training_gets_past(run_dir: Path) -> None:
    """P20: the next restore takes the newest finite checkpoint, then an older one; each is noted in the ledger."""
    with opened(run_dir, step_interval=2, on_non_finite="rollback") as ckpt:
        live, restores = loop(ckpt, lambda step, rollbacks: step == 7 and rollbacks < 3, 12)
        assert restores == [0, 6, 4, 2]
        assert (float(live["w"]), live["n"]) == (12.0, 12)
        assert [one.step for one in ckpt.checkpoints()][:6] == [12, 10, 8, 6, 4, 2]
    assert notes_of(run_dir) == [(6, 7), (4, 7), (2, 7)]


def test_rollbacks_that_do_not_help_end(run_dir: Path) -> None:
    """P20: three at most for one place; a later bad step has three of its own; without a checkpoint there is none."""
    with opened(run_dir / "again", step_interval=1, on_non_finite="rollback") as ckpt:
        with pytest.raises(NonFiniteError, match="3 rollbacks did not help") as caught:
            loop(ckpt, lambda step, _: step == 7, 12)
        assert not caught.value.rolls_back
    assert notes_of(run_dir / "again") == [(6, 7), (5, 7), (4, 7)]
    with opened(run_dir / "later", step_interval=1, on_non_finite="rollback") as ckpt:
        bad = {5: (0, 1), 9: (2, 3, 4)}
        _, restores = loop(ckpt, lambda step, rollbacks: rollbacks in bad.get(step, ()), 12)
        assert restores == [0, 4, 3, 8, 7, 6]
    first = opened(run_dir / "first", step_interval=1, on_non_finite="rollback")
    with first as ckpt, pytest.raises(NonFiniteError, match="no older checkpoint"):
        loop(ckpt, lambda step, _: step == 1, 12)


def test_a_rollback_passes_over_what_was_not_finite(run_dir: Path) -> None:
    """P20: a checkpoint that an earlier process committed with a NaN is not gone back to."""
    with opened(run_dir) as ckpt:
        for step, loss in ((1, 1.0), (2, NAN), (3, 1.0)):
            ckpt.save(step, {"w": torch.full((), float(step)), "n": step}, metrics={"loss": loss})
    with opened(run_dir, on_non_finite="rollback") as ckpt:
        live, restores = loop(ckpt, lambda step, rollbacks: step == 4 and rollbacks < 2, 5)
        assert restores == [3, 3, 1]
        assert float(live["w"]) == 5.0
