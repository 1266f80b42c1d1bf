"""Evaluations by the ranks of a gang, together: after a training, and asked for later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.flows import engines
from ckpt_tasks.flows.console import Ended, TerminalTraining, train_in_terminal
from ckpt_tasks.flows.evaluate import evaluate
from tests.support.agents import REDUCING, config_of, kept

pytestmark = pytest.mark.usefixtures("harness")


@pytest.fixture(autouse=True)
def _one_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "Gang", lambda: kept)


def train(run_dir: Path, **params: int) -> Ended:
    config = config_of(run_dir, run_key="reducing")
    training = TerminalTraining(program=REDUCING, config=config, steps=4, params=params, batch_steps=4, ranks=2)
    return train_in_terminal(training, again="ckpt train …")


@pytest.mark.slow
def test_ranks_evaluate_together(run_dir: Path) -> None:
    """A program that needs its ranks, to be built and to add up, is evaluated at the end of its training, and later."""
    done = train(run_dir)
    assert (done.status, [result.metrics["total"] for result in done.evaluations]) == (0, [3.0])  # ranks 0 and 1: 1 + 2
    where: dict[str, Any] = {"run_key": "reducing", "checkpoint_dir": str(run_dir), "program": REDUCING}
    [whole] = evaluate(**where, ranks=2, suite="full")
    assert (whole.step, whole.outcome, whole.metrics["total"]) == (4, "recorded", 3.0)
    assert [result.step for result in evaluate(**where, ranks=2, which="pending")] == [0]
    recorded = {(each.suite, each.step): each.metrics["total"] for each in open_run(str(run_dir)).evaluations()}
    assert recorded == {("quick", 4): 3.0, ("full", 4): 3.0, ("quick", 0): 3.0}
