"""The train flow on two ranks, against a real server: retries, pages, evaluations, rollbacks and forks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.sorting import FlowRunSort

from ckpt_tasks import open_run
from ckpt_tasks.checkpoint.save.provenance import command_of
from ckpt_tasks.flows import engines
from ckpt_tasks.flows.console import TerminalTraining, train_in_terminal
from ckpt_tasks.flows.evaluate import evaluate
from ckpt_tasks.flows.train import TrainResult, train
from ckpt_tasks.run.opening import read_manifest
from tests.flows.test_train import task_runs
from tests.support import elastic
from tests.support.agents import PARALLEL, REDUCING, config_of, kept, trained
from tests.support.cli_runs import ckpt
from tests.support.elastic import ELASTIC

pytestmark = pytest.mark.usefixtures("harness")


@pytest.fixture(autouse=True)
def _one_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all flows of this process start their ranks from one fork server, which takes seconds to import torch."""
    monkeypatch.setattr(engines, "Gang", lambda: kept)


def run(run_dir: Path, total_steps: int, **options: Any) -> TrainResult:
    checkpoint = {"checkpoint_dir": str(run_dir), "max_num_checkpoints": None}
    defaults = {"run_key": "gang", "checkpoint": checkpoint, "program": PARALLEL, "batch_steps": 5, "ranks": 2}
    result: TrainResult = train(total_steps=total_steps, **{**defaults, **options})
    return result


def assert_pages(run_dir: Path) -> None:
    """The newest flow run has one table of its gangs, and the run's report has them, too."""
    with get_client(sync_client=True) as client:
        newest = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)[0]
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[newest.id]))
        pages = {str(one.key): one for one in client.read_artifacts(artifact_filter=mine)}
    after, before = json.loads(str(pages["gang-ranks"].data))
    assert (before["steps"] in ("0 to 5", "0 to 6"), before["ranks"], before["restored from"]) == (True, "2", "")
    assert (after["steps"], after["hosts"].endswith(": 0 to 1"), after["ended by"]) == ("5 to 8", True, "")
    assert before["ended by"].startswith("rank 1 was killed by SIGKILL")
    assert re.fullmatch(r"rank [01] works \d+% of the time", after["slowest rank"])
    assert after["restored from"]
    happened = str(pages["gang-report"].data).partition("What happened")[2]
    assert "a worker group began at step 5" in happened
    assert "rank 1 was killed by SIGKILL" in happened


def test_a_killed_rank_is_a_retry(run_dir: Path, tmp_path: Path) -> None:
    """A batch whose rank is killed is retried by Prefect, with a new gang; the end is that of an undisturbed flow.

    Its sharded checkpoint is evaluated in one process, and a later flow run goes on from it.
    """
    result = run(tmp_path / "whole", 12, params={"kind": "fsdp"})
    assert (result.step, result.trained, list(result.metrics)) == (12, 12, ["loss"])
    params = {"kind": "fsdp", "plan": [(7, 1, "kill")], "folder": str(tmp_path)}
    for total in (8, 12):
        assert run(run_dir, total, params=params, retry_delay_seconds=0).step == total
        runs = task_runs()
        counts = [(one.name, one.run_count, one.state_name) for one in runs]
        assert counts[-1] == (("steps 5 to 8", 2, "Completed") if total == 8 else ("steps 10 to 12", 1, "Completed"))
        assert_pages(run_dir) if total == 8 else None
    assert trained(run_dir, kind="fsdp")[:2] == trained(tmp_path / "whole", kind="fsdp")[:2]
    [evaluated] = evaluate(run_key="gang", checkpoint_dir=str(run_dir), program=PARALLEL, params={"kind": "fsdp"})
    assert (evaluated.step, evaluated.outcome) == (12, "recorded")


@pytest.mark.slow
def test_a_fork_of_ranks_has_another_learning_rate(run_dir: Path, tmp_path: Path) -> None:
    """A fork with another parameter trains on two ranks as on one, from the step that it was forked at."""
    run(tmp_path / "whole", 5, params={"kind": "fsdp"})
    result = run(run_dir, 7, run_key="forked", fork_from=f"{tmp_path / 'whole'}@5", params={"kind": "fsdp", "lr": 0.5})
    assert (result.step, result.trained) == (7, 2)
    assert open_run(str(run_dir)).head().state.params == {"kind": "fsdp", "lr": 0.5}


@pytest.mark.slow
def test_a_rollback_leaves_batches_out(run_dir: Path, tmp_path: Path) -> None:
    """`skip_batches` leaves out the same samples on two ranks as on one: both are at one position in the data then."""
    positions = []
    for place, ranks in ((run_dir, 2), (tmp_path / "one", 1)):
        run(place, 10, program=ELASTIC, ranks=ranks)
        before = position(place)
        assert run(place, 10, program=ELASTIC, ranks=ranks, rollback_to=5, skip_batches="6-7").trained == 5
        assert position(place) != before
        positions.append(position(place))
    assert positions[0] == positions[1]


def position(run_dir: Path) -> object:
    return elastic.trained(run_dir)[1]["data"]


@pytest.mark.slow
def test_another_number_of_ranks_is_said(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A start on one rank of what two have trained says so, on the terminal and in the log; the same number does not.

    A checkpoint names the command of the gang's agent, and a fork is to be trained on as many ranks.
    """
    caplog.set_level("INFO")

    def said(steps: int, ranks: int) -> str:
        config = config_of(run_dir, run_key="gang")
        train_in_terminal(
            TerminalTraining(program=ELASTIC, config=config, steps=steps, params={}, ranks=ranks), again=""
        )
        return capsys.readouterr().out

    assert "was saved by" not in said(2, 2) + said(4, 2) + caplog.text
    run, newest = open_run(str(run_dir)), open_run(str(run_dir)).find(4)
    assert read_manifest(run.history.store, newest).environment["command"] == command_of(sys.orig_argv)
    assert "--ranks 2" in ckpt("fork", f"{run_dir}@4", str(tmp_path / "forked")).out
    wanted = "Step 4 was saved by 2 ranks, and 1 resumes it: a step has 1/2 of its samples if each rank has as many as"
    assert wanted in said(6, 1)
    assert [wanted in record.getMessage() for record in caplog.records].count(True) == 1


@pytest.mark.slow
def test_ranks_evaluate_together(run_dir: Path) -> None:
    """A program that needs its ranks, to be built and to add up, is evaluated at the end of its training, and later."""
    config = config_of(run_dir, run_key="reducing")
    training = TerminalTraining(program=REDUCING, config=config, steps=4, params={}, batch_steps=4, ranks=2)
    done = train_in_terminal(training, again="ckpt train …")
    assert (done.status, [result.metrics["total"] for result in done.evaluations]) == (0, [3.0])  # ranks 0 and 1: 1 + 2
    where: dict[str, Any] = {"run_key": "reducing", "checkpoint_dir": str(run_dir), "program": REDUCING}
    [whole] = evaluate(**where, ranks=2, suite="full")
    assert (whole.step, whole.outcome, whole.metrics["total"]) == (4, "recorded", 3.0)
    assert [result.step for result in evaluate(**where, ranks=2, which="pending")] == [0]
    recorded = {(each.suite, each.step): each.metrics["total"] for each in open_run(str(run_dir)).evaluations()}
    assert recorded == {("quick", 4): 3.0, ("full", 4): 3.0, ("quick", 0): 3.0}
