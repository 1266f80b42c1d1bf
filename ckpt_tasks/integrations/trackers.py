"""TensorBoard, MLflow and Weights & Biases get the committed steps: they show the run's curve, over all resumes.

A tracker gets a step when the step is committed, so it never has a step that was trained and lost. A small file, the
mark, names the last step that the tracker has. A restart continues after this step: it reads from the run the steps
that were committed but did not reach the tracker, because the process died before. If training goes back to an older
checkpoint, the restore tells the tracker which steps were abandoned.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.restore.restore import RestoreReport
from ckpt_tasks.checkpoint.save.listening import Listener
from ckpt_tasks.format.layout.steps import StepMetrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_MOST_AT_ONCE = 900  # MLflow takes at most 1,000 metrics in one request.


class Tracker:
    """The base of all trackers; `directory` holds the mark, on a disk that the next process can read.

    Subclasses write steps in `write`, and mark the steps from `first` to `last` as abandoned in `left`.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)
        self._mark = self.directory / f"ckpt-tasks-{type(self).__name__.lower()}.json"

    def follow(self, ckpt: Checkpointer) -> None:
        """Write the steps that this Checkpointer commits from now on. Call it before `restore`. Only rank 0 writes."""
        ckpt.listen(Listener(measured=self.measured, restored=lambda report: self.restored(ckpt, report)))

    def measured(self, steps: Sequence[StepMetrics]) -> None:
        """Write committed steps, and move the mark."""
        self.write(steps)
        self._remember(steps[-1].step)

    def restored(self, ckpt: Checkpointer, report: RestoreReport) -> None:
        """Update the tracker to the restored step: add missing steps, mark abandoned ones."""
        known = self.known_step
        if known > report.step:
            self.left(report.step + 1, known)
            self._remember(report.step, [*self.left_behind, (report.step + 1, known)])
        elif known < report.step:
            curve = ckpt.run.curve().steps
            missing = [s for s in curve if known < s.step <= report.step and not s.abandoned]
            if missing:
                self.measured([StepMetrics(s.step, s.at_s, s.metrics) for s in missing])

    @property
    def known_step(self) -> int:
        """The last step that the tracker has; 0 if it has no step."""
        return int(self._marked().get("step", 0))

    @property
    def left_behind(self) -> list[tuple[int, int]]:
        """The first and the last step of every abandoned stretch, in the order in which they were abandoned."""
        return [(first, last) for first, last in self._marked().get("left", [])]

    def write(self, steps: Sequence[StepMetrics]) -> None:
        """Write the metrics of committed steps to the tracker."""
        raise NotImplementedError

    def left(self, first: int, last: int) -> None:
        """Mark these steps as abandoned in the tracker."""
        raise NotImplementedError

    def _marked(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._mark.read_text()))
        except FileNotFoundError:
            return {}

    def _remember(self, step: int, left: Sequence[tuple[int, int]] | None = None) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        new = self._mark.with_suffix(".new")
        new.write_text(json.dumps({"step": step, "left": self.left_behind if left is None else left}))
        new.replace(self._mark)

    def _with(self, first: int, last: int) -> str:
        """Return all abandoned steps and the given ones in words; a repeated call after a crash adds them once."""
        return ", ".join(f"{begin} to {end}" for begin, end in [*self.left_behind, (first, last)])


class TensorBoard(Tracker):
    """Scalars in a log directory of TensorBoard. Abandoned steps are purged: TensorBoard hides them."""

    def __init__(self, log_dir: str | os.PathLike[str]):
        super().__init__(log_dir)
        self._writer: SummaryWriter | None = None

    def write(self, steps: Sequence[StepMetrics]) -> None:
        """Write a scalar for each metric of each step, at the time when it was reported."""
        writer = self._open(steps[0].step)
        for step, at_s, metrics in steps:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step, walltime=at_s)
        writer.flush()

    def left(self, first: int, last: int) -> None:
        """Begin a new file that purges everything from step `first` on."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._open(first).flush()

    def _open(self, first: int) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        # Purge these steps: a process that died before it moved the mark may have written them already.
        if self._writer is None:
            self._writer = SummaryWriter(self.directory, purge_step=first)
        return self._writer


class MLflow(Tracker):
    """One MLflow run for one run of training, however often training resumes.

    `directory` holds the mark. MLflow cannot delete values, so the tag `ckpt_tasks.left_behind` names abandoned steps;
    later values of the same steps are added to the earlier ones. While no process trains, the run has the status
    finished, unless the last process was killed.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, run_key: str, experiment: str = "Default", uri: str | None = None
    ):
        super().__init__(directory)
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        self.run_id = self._find(run_key, experiment)
        atexit.register(self._client.set_terminated, self.run_id)

    def write(self, steps: Sequence[StepMetrics]) -> None:
        """Log each metric of each step, at the time when it was reported."""
        from mlflow.entities import Metric

        rows = [Metric(name, value, round(at_s * 1000), step) for step, at_s, ms in steps for name, value in ms.items()]
        for begin in range(0, len(rows), _MOST_AT_ONCE):
            self._client.log_batch(self.run_id, metrics=rows[begin : begin + _MOST_AT_ONCE])

    def left(self, first: int, last: int) -> None:
        """Add the steps to the tag `ckpt_tasks.left_behind`."""
        self._client.set_tag(self.run_id, "ckpt_tasks.left_behind", self._with(first, last))

    def _find(self, run_key: str, experiment: str) -> str:
        known = self._client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known else self._client.create_experiment(experiment)
        quoted = run_key.replace("'", "")
        runs = self._client.search_runs([experiment_id], f"tags.`ckpt_tasks.run_key` = '{quoted}'", max_results=1)
        if runs:
            run_id = str(runs[0].info.run_id)
            self._client.update_run(run_id, status="RUNNING")  # The previous process has marked the run as finished.
            return run_id
        made = self._client.create_run(experiment_id, tags={"ckpt_tasks.run_key": quoted}, run_name=run_key)
        return str(made.info.run_id)


class WandB(Tracker):
    """One run of Weights & Biases for one run of training; `settings` go to `wandb.init` (project, mode, …).

    Metrics are drawn against `step`. When training goes back, `line` is increased, to tell later steps from abandoned
    ones, and the summary `left_behind` names the abandoned steps.
    """

    def __init__(self, directory: str | os.PathLike[str], *, run_key: str, **settings: Any):
        super().__init__(directory)
        import wandb

        self.directory.mkdir(parents=True, exist_ok=True)
        self.run: Any = wandb.init(id=run_key, name=run_key, dir=self.directory, resume="allow", **settings)
        self.run.define_metric("*", step_metric="step")
        self._line = len(self.left_behind)

    def write(self, steps: Sequence[StepMetrics]) -> None:
        """Log the metrics of each step."""
        for step, at_s, metrics in steps:
            self.run.log({**metrics, "step": step, "line": self._line, "at_s": at_s})

    def left(self, first: int, last: int) -> None:
        """Start another line, since these steps are abandoned."""
        self._line = len(self.left_behind) + 1
        self.run.summary["left_behind"] = self._with(first, last)
