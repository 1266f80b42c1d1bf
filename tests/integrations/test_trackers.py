"""Trackers have the run's own curve: every committed step once, over crashes and resumes."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import NonFiniteError
from ckpt_tasks.format.layout.steps import StepMetrics
from ckpt_tasks.integrations.trackers import MLflow, TensorBoard, Tracker, WandB
from ckpt_tasks.run.ledger.config import CheckpointConfig


class Noted(Tracker):
    """A tracker that writes into lists which outlive it."""

    def __init__(self, directory: Path, steps: list[int], lines: list[tuple[int, int]]):
        super().__init__(directory)
        self.steps, self.lines = steps, lines
        self.fails = False

    def write(self, steps: Sequence[StepMetrics]) -> None:
        if self.fails:
            raise OSError("the tracker's server is away")
        self.steps += [one.step for one in steps]

    def left(self, first: int, last: int) -> None:
        self.lines.append((first, last))


def train(root: Path, tracker: Tracker, end: int, back: int | None = None) -> None:
    """Train to a step, from an older one if given; every step says a loss, every tenth is saved."""
    config = CheckpointConfig(checkpoint_dir=root / "run", step_interval=10, max_num_checkpoints=None, memory_dir=None)
    with Checkpointer(config) as ckpt:
        tracker.follow(ckpt)
        for step in range(ckpt.restore({"at": 0}, step=back) + 1, end + 1):
            ckpt.step(step, {"at": 0}, metrics={"loss": float(step)})
            ckpt.wait()


def spike(root: Path, tracker: Tracker) -> None:
    """Train to step 40 through a loss that is NaN at step 25, twice: back to step 20, then further back."""
    config = CheckpointConfig(
        checkpoint_dir=root / "run",
        step_interval=10,
        max_num_checkpoints=None,
        memory_dir=None,
        on_non_finite="rollback",
    )
    with Checkpointer(config) as ckpt:
        tracker.follow(ckpt)
        step, times = ckpt.restore({"at": 0}), 0
        while step < 40:
            bad = step + 1 == 25 and times < 2
            try:
                ckpt.step(step + 1, {"at": 0}, metrics={"loss": math.nan if bad else float(step + 1)})
            except NonFiniteError:
                times += 1
                step = ckpt.restore({"at": 0})
            else:
                step += 1
                ckpt.wait()


def test_a_tracker_has_every_committed_step_once_and_hears_of_what_was_left(tmp_path: Path) -> None:
    """Uncommitted steps never reach it; a restart goes on; a restore of an older step names what it leaves behind."""
    steps: list[int] = []
    lines: list[tuple[int, int]] = []
    train(tmp_path, Noted(tmp_path, steps, lines), 25)
    assert steps == [*range(1, 21)]
    train(tmp_path, Noted(tmp_path, steps, lines), 40)
    assert (steps, lines) == ([*range(1, 41)], [])
    train(tmp_path, Noted(tmp_path, steps, lines), 30, back=20)
    assert lines == [(21, 40)]
    assert steps[40:] == [*range(21, 31)]


def test_what_a_tracker_missed_comes_from_the_run(tmp_path: Path) -> None:
    """A server that was away, or a death between commit and write: the next start brings the steps from the run."""
    steps: list[int] = []
    deaf = Noted(tmp_path, steps, [])
    deaf.fails = True
    train(tmp_path, deaf, 20)
    assert steps == []
    train(tmp_path, Noted(tmp_path, steps, []), 30)
    assert steps == [*range(1, 31)]


def test_a_tracker_that_comes_late_gets_the_line_that_goes_on(tmp_path: Path) -> None:
    """Steps of an abandoned line, and steps after the restored one, are not brought from the run."""
    early, late = tmp_path / "early", tmp_path / "late"
    train(tmp_path, Noted(early, [], []), 40)
    train(tmp_path, Noted(early, [], []), 30, back=20)
    for end, back in ((40, None), (20, 10)):
        steps: list[int] = []
        train(tmp_path, Noted(late / str(end), steps, []), end, back)
        assert steps == [*range(1, end + 1)]


def test_a_spike_is_marked_once(tmp_path: Path) -> None:
    """With `on_non_finite="rollback"` what was committed and left is marked, once; a restart marks nothing again."""
    steps: list[int] = []
    lines: list[tuple[int, int]] = []
    spike(tmp_path, Noted(tmp_path, steps, lines))
    assert (steps, lines) == ([*range(1, 21), *range(11, 41)], [(11, 20)])
    train(tmp_path, again := Noted(tmp_path, steps, lines), 50)
    assert (steps[-1], lines, again.left_behind) == (50, [(11, 20)], [(11, 20)])


def test_a_death_between_mark_and_memory_marks_the_same_again(tmp_path: Path) -> None:
    """The process dies after the tracker was told and before the mark was written: it is told the same again."""
    train(tmp_path, Noted(tmp_path, [], []), 40)
    mark = tmp_path / "ckpt-tasks-noted.json"
    before = mark.read_text()
    told: list[Any] = []

    class Telling(Noted):
        def left(self, first: int, last: int) -> None:
            told.append([*self.left_behind, (first, last)])

    Telling.__name__ = "Noted"  # as the mark is named
    for _ in range(2):
        mark.write_text(before)
        train(tmp_path, Telling(tmp_path, [], []), 30, back=20)
    train(tmp_path, Telling(tmp_path, [], []), 30, back=10)
    assert told == [[(21, 40)], [(21, 40)], [(21, 40), (11, 30)]]


@pytest.mark.framework
@pytest.mark.parametrize("left", ["resumed", "a spike"])
def test_tensorboard_shows_one_line(left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What TensorBoard reads after two resumes and a step back, or a spike: every step once, with its value."""
    # It would import TensorFlow, if that is there; its own stub reads the same files.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if left == "a spike":
        spike(tmp_path, TensorBoard(tmp_path / "logs"))
    else:
        for end, back in ((25, None), (40, None), (35, 30)):
            train(tmp_path, TensorBoard(tmp_path / "logs"), end, back)
    events = EventAccumulator(str(tmp_path / "logs"), size_guidance={"scalars": 0})
    events.Reload()
    # Steps 31 to 35 are trained again, and not committed: the line ends where training went on from.
    expected = [(step, float(step)) for step in range(1, 41 if left == "a spike" else 31)]
    assert [(one.step, one.value) for one in events.Scalars("loss")] == expected


@pytest.mark.framework
@pytest.mark.slow
def test_mlflow_continues_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many processes, one MLflow run: every step once; a tag names what was left behind; it ends with the process."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/mlruns"
    made = []
    for end, back in ((25, None), (40, None), (30, 20)):
        made.append(MLflow(tmp_path / "mark", run_key="run", uri=uri))
        train(tmp_path, made[-1], end, back)
    (run_id,) = {tracker.run_id for tracker in made}
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    history = [(one.step, one.value) for one in client.get_metric_history(run_id, "loss")]
    assert history == [(step, float(step)) for step in (*range(1, 41), *range(21, 31))]
    assert client.get_run(run_id).data.tags["ckpt_tasks.left_behind"] == "21 to 40"
    program = f"from {MLflow.__module__} import MLflow; MLflow({str(tmp_path / 'mark')!r}, run_key='run', uri={uri!r})"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert client.get_run(run_id).info.status == "FINISHED"
    assert MLflow(tmp_path / "mark", run_key="run", uri=uri).run_id == run_id
    assert client.get_run(run_id).info.status == "RUNNING"
    spike(tmp_path / "other", other := MLflow(tmp_path / "other", run_key="other", uri=uri))
    assert client.get_run(other.run_id).data.tags["ckpt_tasks.left_behind"] == "11 to 20"


@pytest.mark.framework
@pytest.mark.slow
def test_wandb_continues_one_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, every process writes a file of the same run id; steps after a spike are on line 1, also later."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    for end in (40, 50):
        tracker = WandB(tmp_path / "wandb", run_key="run", project="tests", mode="offline")
        if end == 40:
            spike(tmp_path, tracker)
            assert tracker.run.summary["left_behind"] == "11 to 20"
        else:
            train(tmp_path, tracker, end)
        summary = tracker.run.summary
        assert (tracker.run.id, summary["step"], summary["line"]) == ("run", end, 1)
        tracker.run.finish()
    assert len([*(tmp_path / "wandb").rglob("run-run.wandb")]) == 2
