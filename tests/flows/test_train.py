"""The train flow: batches, retries, resumes, and what it refuses, in this process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import TaskRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ParameterTypeError
from prefect.utilities.callables import parameter_schema

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import (
    ConfigError,
    FencedError,
    NonFiniteError,
    ProgramError,
    RunMismatchError,
    StateMismatchError,
)
from ckpt_tasks.flows.session.local_session import LocalSession, build_program
from ckpt_tasks.flows.session.session import Progress, watcher
from ckpt_tasks.flows.step_batch import step_batch
from ckpt_tasks.flows.train import TrainResult, train
from tests.support.cli_runs import flip
from tests.support.sweeps import quick_first
from tests.support.tiny import Tiny

pytestmark = pytest.mark.usefixtures("harness")
TINY = "tests.support.tiny:Tiny"


def run(run_dir: Path, total_steps: int, **options: Any) -> TrainResult:
    checkpoint = {"checkpoint_dir": str(run_dir), "max_num_checkpoints": None}
    defaults = {"run_key": "tiny", "checkpoint": checkpoint, "program": TINY, "batch_steps": 5}
    result: TrainResult = train(total_steps=total_steps, **{**defaults, **options})
    return result


def final(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the newest checkpoint's whole state, restored into a fresh program: weights, moments, counts, streams."""
    fresh = build_program(TINY, {"seed": 99})
    at = open_run(str(run_dir))
    at.restore(at.find("latest"), fresh.state, partial=False)
    moments = [value for one in fresh.state["optimizer"].state.values() for value in one.values()]
    return {
        **{name: value.clone() for name, value in fresh.state["model"].state_dict().items()},
        "moments": torch.cat([torch.as_tensor(value).flatten() for value in moments]),
        "steps": fresh.state["steps"],
        "next random numbers": torch.rand(4),
    }


def assert_equal(one: Path, other: Path) -> None:
    mine, theirs = final(one), final(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def task_runs() -> list[TaskRun]:
    """Return the task runs of the newest flow run, oldest first."""
    with get_client(sync_client=True) as client:
        newest = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)[0]
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[newest.id])))
    return sorted(found, key=lambda one: str(one.start_time))


def damage(run_dir: Path) -> None:
    """Flip one bit of the newest checkpoint's weights."""
    newest = open_run(str(run_dir)).find("latest")
    shard = next((run_dir / newest.manifest).parent.glob("model-*.safetensors"))
    flip(shard, -1)


def steps(run_dir: Path) -> list[int]:
    return [one.step for one in open_run(str(run_dir)).checkpoints()]


@pytest.fixture(scope="module")
def whole(harness: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of 12 steps that nothing has stopped; its flow run is looked at here.

    Batches are tasks named by their steps; each ends with a commit, and step 0 is saved before the first.
    """
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    result = run(run_dir, 12)
    assert (result.step, result.trained, list(result.metrics)) == (12, 12, ["loss"])
    assert steps(run_dir) == [12, 10, 5, 0]
    runs = task_runs()
    assert [one.name for one in runs] == ["steps 0 to 5", "steps 5 to 10", "steps 10 to 12"]
    assert all(one.tags == [] for one in runs)
    return run_dir


def notes(run_dir: Path, what: str) -> list[dict[str, Any]]:
    """Return the notes of one kind, oldest first."""
    return [note for note in reversed(open_run(str(run_dir)).notes()) if note["note"] == what]


def test_started_again_it_goes_on_bit_for_bit(run_dir: Path, whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P49, P73: a run in pieces, the last one damaged and trained again, ends as the run in one piece, streams too.

    A flow run of a complete run trains nothing, builds no program, commits nothing, and says so.
    """
    for total in (4, 12):
        run(run_dir, total)
    assert_equal(run_dir, whole)
    damage(run_dir)
    assert run(run_dir, 12).trained == 2
    assert_equal(run_dir, whole)
    before = open_run(str(run_dir)).head().next_n
    assert "Nothing was left" not in caplog.text
    result = run(run_dir, 8, params={"width": -1})
    assert (result.step, result.trained) == (12, 0)
    assert "Nothing was left to train to step 8: step 12 is committed." in caplog.text
    assert open_run(str(run_dir)).head().next_n == before


@pytest.mark.parametrize("fail_at", quick_first([7, 1]))
def test_an_exception_in_a_step_changes_nothing(run_dir: Path, whole: Path, fail_at: int) -> None:
    """P73: a step that raises after backward is retried from the last commit, and the result is bit-equal.

    In the first batch too, where there is only step 0 to restore; and the dropped gradients do not come back.
    """
    failures = run_dir.with_name("failures")
    params = {"fail_at": fail_at, "times": 2, "failures": str(failures)}
    result = run(run_dir, 12, params=params, retry_delay_seconds=0)
    assert failures.read_text().count("\n") == 2
    assert result.trained == 12
    assert_equal(run_dir, whole)


@pytest.mark.slow
def test_retries_end(run_dir: Path) -> None:
    """A step that always raises fails the flow with its own error after the retries; what was committed stays.

    The cadence saves within a batch as well, and a retry goes on from there.
    """
    # Steps of a millisecond: without keep_every_n_steps a newer snapshot takes the place of one that waits.
    every = {"step_interval": 2, "keep_every_n_steps": 2, "max_num_checkpoints": None}
    params = {"fail_at": 9, "times": 99, "failures": str(run_dir.with_name("failures"))}
    config = {"checkpoint_dir": str(run_dir), **every}
    with pytest.raises(RuntimeError, match="injected in step 9"):
        run(run_dir, 20, checkpoint=config, batch_steps=6, params=params, retries=1, retry_delay_seconds=0)
    assert steps(run_dir) == [8, 6, 4, 2, 0]
    runs = [(one.name, one.run_count, one.state_name) for one in task_runs()]
    assert runs == [("steps 0 to 6", 1, "Completed"), ("steps 6 to 12", 2, "Failed")]


def test_a_batch_that_was_done_meanwhile_commits_nothing(run_dir: Path, whole: Path) -> None:
    """P75: a batch whose restore lands at its end already, as another process trained it, adds no step of its own."""
    shutil.copytree(whole, run_dir)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), run_key="tiny")) as ckpt:
        done = step_batch(LocalSession(ckpt, TINY), retries=0, retry_delay_seconds=0)(5, 12)
    assert done.end == 12
    assert steps(run_dir)[0] == 12


def diverging(run_dir: Path, total: int, params: dict[str, Any], **checkpoint: Any) -> TrainResult:
    config = {"checkpoint_dir": str(run_dir), "max_num_checkpoints": None, **checkpoint}
    how = {"program": "tests.support.tiny:Diverging", "checkpoint": config, "retry_delay_seconds": 0.0}
    return run(run_dir, total, params={"bad_from": 8, **params}, **how)


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_ends_a_flow_run_that_says_stop(run_dir: Path) -> None:
    """P20: nothing of the bad step is committed, and no retry repeats it; the failure is in the ledger, once."""
    for count in ([1, 1], [1]):
        with pytest.raises(NonFiniteError, match="loss is nan"):
            diverging(run_dir, 20, {}, on_non_finite="stop")
        assert [one.run_count for one in task_runs()] == count
        assert steps(run_dir) == [5, 0]
    assert {(note["step"], "loss is nan" in str(note["why"])) for note in notes(run_dir, "failure")} == {(7, True)}


def test_a_loss_that_is_not_a_number_rolls_a_flow_run_back(run_dir: Path, whole: Path) -> None:
    """P20, P73: the retry trains on from an older checkpoint each time, and the end is as without it; three at most."""
    params = {"bad_times": 2, "failures": str(run_dir.with_name("bad"))}
    assert diverging(run_dir, 12, params, on_non_finite="rollback").step == 12
    assert [one.run_count for one in task_runs()] == [1, 3, 1]
    assert [(note["step"], note["failed"]) for note in notes(run_dir, "rollback")] == [(5, 8), (0, 8)]
    assert_equal(run_dir, whole)


@pytest.mark.parametrize(
    ("options", "error"),
    quick_first(
        [
            ({"program": "tests.support.forks:Scheduled"}, RunMismatchError),
            ({"program": "nowhere:Tiny"}, ProgramError),
            ({"program": "tests.support.absent:Tiny"}, ProgramError),
            ({"program": "collections:Counter"}, ProgramError),
            ({"run_key": "other"}, RunMismatchError),
            ({"skip_batches": "13"}, ConfigError),
        ],
    ),
)
def test_what_is_not_the_runs_own_changes_nothing(
    run_dir: Path, whole: Path, options: dict[str, Any], error: type[Exception]
) -> None:
    """P52: a program that is absent, is none, or another run's, and another run's directory: refused before any task.

    A complete run refuses them, too.
    """
    shutil.copytree(whole, run_dir)
    before = sorted(path.name for path in (run_dir / "ledger").iterdir())
    for total in (12, 14):
        with pytest.raises(error):
            run(run_dir, total, **options)
    assert sorted(path.name for path in (run_dir / "ledger").iterdir()) == before


@pytest.mark.parametrize(
    ("params", "error", "attempts"), [({"wdith": 4}, ProgramError, []), ({"width": 16}, StateMismatchError, [1])]
)
def test_bad_parameters_are_not_retried(
    run_dir: Path, whole: Path, params: dict[str, Any], error: type[Exception], attempts: list[int]
) -> None:
    """A wrong parameter fails before any task, another shape at the first attempt; nothing changes."""
    shutil.copytree(whole, run_dir)
    with pytest.raises(error):
        run(run_dir, 14, params=params)
    assert steps(run_dir)[0] == 12
    assert [one.run_count for one in task_runs()] == attempts


def test_options_are_checked_before_anything_runs(run_dir: Path) -> None:
    """A misspelled option, a wrong value, a missing one: Prefect refuses the flow run, and no directory appears."""
    for checkpoint in (
        {"checkpoint_dir": str(run_dir), "stepinterval": 5},
        {"checkpoint_dir": str(run_dir), "step_interval": 0},
        {"step_interval": 5},
    ):
        with pytest.raises(ParameterTypeError):
            run(run_dir, 5, checkpoint=checkpoint)
    assert not run_dir.exists()


def test_the_schema_of_the_deployment_forbids_unknown_options() -> None:
    """The server refuses a deployment's flow run with an unknown option by the schema alone."""
    schema = parameter_schema(train.fn).model_dump()
    assert schema["definitions"]["CheckpointConfig"]["additionalProperties"] is False
    assert set(schema["required"]) == {"run_key", "total_steps", "checkpoint"}
    config = CheckpointConfig(checkpoint_dir="x", step_interval=3)
    validated = train.validate_parameters({"run_key": "a", "total_steps": 1, "checkpoint": vars(config)})
    assert validated["checkpoint"] == config


def test_a_flow_run_that_lost_its_directory_stops(run_dir: Path) -> None:
    """P33: when another process takes the run over, the flow ends with FencedError at its next commit, not retried."""
    other = Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), run_key="tiny"), take_over=True)
    state = dict(Tiny().state)

    def take_over(progress: Progress) -> None:
        if progress.step == 7:
            other.restore(state)
            other.save(6, state)

    token = watcher.set(take_over)
    try:
        with pytest.raises(FencedError):
            run(run_dir, 20)
    finally:
        watcher.reset(token)
        other.close()
    assert steps(run_dir) == [6, 5, 0]
    assert (task_runs()[-1].name, task_runs()[-1].run_count) == ("steps 5 to 10", 1)
