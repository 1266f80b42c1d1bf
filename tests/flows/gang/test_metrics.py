"""What the ranks of a gang have measured becomes one: for pages, the best checkpoint, the early stop and spikes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.errors import ProgramError
from ckpt_tasks.flows.gang.gang_session import GangSession
from ckpt_tasks.flows.session.session import Progress, watcher
from tests.support.agents import config_of, kept

COUNTING = "tests.support.parallel:Counting"
WANTED = {"loss": 1.5, "correct": 3.0, "least": 1.0, "most": 2.0, "lr": 7.0}


def test_metrics_are_those_of_all_ranks(run_dir: Path) -> None:
    """A metric is the mean of the ranks that have it, or what the program says; the amount of data is the sum."""
    seen: list[Progress] = []
    token = watcher.set(seen.append)
    try:
        with GangSession(config_of(run_dir, step_interval=1), COUNTING, ranks=2, engine=kept) as session:
            session.restore()
            session.run(2)
            session.save(2)
            measured = session.evaluate(open_run(str(run_dir)).find(2), "quick")
    finally:
        watcher.reset(token)
    wanted = {**WANTED, **{f"a metric with a long name, {number}": 1.5 * number for number in range(60)}}
    assert [(step.step, step.amount, step.unit, dict(step.metrics)) for step in seen] == [
        (step, 3.0, "rows", wanted) for step in (1, 2)
    ]
    assert [dict(each.metrics) for each in open_run(str(run_dir)).checkpoints()] == [wanted, wanted, {}]
    assert dict(measured) == {"loss": 1.5, "correct": 3.0}


@pytest.mark.slow
def test_a_rule_that_is_none_is_refused(run_dir: Path) -> None:
    """The error names the metric, the rule and the rules that there are."""
    with GangSession(config_of(run_dir), COUNTING, {"rule": "median"}, ranks=2, engine=kept) as session:
        session.restore()
        with pytest.raises(ProgramError, match=r"the rule 'median' for the metric 'correct'.* mean, sum, min, max"):
            session.run(1)
