"""The output of a flow in a terminal: one live line while it works, and tables at the end."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ckpt_tasks.checkpoint.restore.reading import run_of
from ckpt_tasks.flows.prefect.evaluate import EvaluationResult, evaluation_watcher
from ckpt_tasks.flows.session.session import Progress, watcher
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.report.picture import sort_metrics
from ckpt_tasks.run.report.words import clock, fine_span, plain_table, printable, size, when

_PLAIN_EVERY_S = 10.0
_MOST_METRICS = 3
_WINDOW_S = 10.0  # Speed and time left are those of the newest 10 to 20 s.
_OUTCOMES = {"recorded": "recorded", "known": "recorded before", "pruned": "pruned meanwhile"}


class _Unbroken:
    """A file that ignores text once its reader has closed it, or while its disk is full."""

    def __init__(self, file: Any):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        self._try(self._file.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, call: Callable[..., object], *arguments: str) -> None:
        with suppress(OSError):  # The disk is full.
            try:
                call(*arguments)
            except BrokenPipeError:  # Drop later text, too: a program's prints, and the flush at exit.
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._file.fileno())
                os.close(null)


class Screen(Console):
    """A console that prints texts literally: brackets are no markup, and control codes do not move the cursor.

    Drops text that it cannot write: training continues if no process reads the output, or if the disk is full.
    """

    def __init__(self, *, stderr: bool = False, file: Any = None, **options: Any):
        unbroken: Any = _Unbroken(file or (sys.stderr if stderr else sys.stdout))
        super().__init__(file=unbroken, highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text printable; rich calls this for every text, including table cells."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)


class _Line:
    """A line that changes on a terminal; elsewhere a new line every 10 s. In the block, `watched` holds this object."""

    def __init__(self, out: Console, watched: ContextVar[Any], first: str, *, stays: bool):
        self._out = out
        self._watched, self._first = watched, first
        self._live = Live(console=out, refresh_per_second=4, transient=not stays) if out.is_terminal else None
        self._shown_s = 0.0

    def __enter__(self) -> Self:
        self._token = self._watched.set(self)
        if self._live:
            self._live.update(Text(self._first))
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watched.reset(self._token)
        if self._live:
            self._live.stop()

    def _show(self, text: Callable[[float], str], *, last: bool = False) -> None:
        """Show `text(available width)`; outside a terminal every 10 s, and at once if `last`."""
        if self._live:
            self._live.update(Text(text(self._out.width), no_wrap=True, overflow="ellipsis"))
        elif last or time.monotonic() - self._shown_s >= _PLAIN_EVERY_S:
            self._shown_s = time.monotonic()
            self._out.print(text(math.inf), soft_wrap=True)


@dataclass
class _Sums:
    """What the steps since a moment took, with what came between them (saves, commits), and what they trained on."""

    since_s: float
    steps: int = 0
    wall_s: float = 0.0
    amount: float = 0.0

    def add(self, wall_s: float, progress: Progress) -> None:
        self.steps += 1
        self.wall_s += wall_s
        self.amount += progress.amount


class LiveLine(_Line):
    """Shows the progress of flows during the block: on a terminal one line that changes, else one every 10 s."""

    def __init__(self, out: Console, total_steps: int):
        super().__init__(out, watcher, "Preparing the first step …", stays=True)
        self._total = total_steps
        self._newest: Progress | None = None
        self._sums: list[_Sums] = []
        self._last_s = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """Show the progress of a completed step."""
        now = time.monotonic()
        wall_s, self._last_s = now - self._last_s, now
        if not self._sums:  # `wall_s` includes the time before the first step.
            wall_s = progress.step_s
        if not self._sums or now - self._sums[-1].since_s > _WINDOW_S:
            self._sums = [*self._sums[-1:], _Sums(now)]
        self._sums[-1].add(wall_s, progress)
        self._newest = progress
        if progress.step < self._total:  # `finish` shows the last step, with the commit that follows it.
            self._show(lambda width: self.text(progress, width))

    def finish(self, commit: Checkpoint) -> None:
        """Show the last step of a complete training, with its commit."""
        if self._newest is not None:
            last = replace(self._newest, commit=commit)
            self._show(lambda width: self.text(last, width), last=True)

    def text(self, progress: Progress, width: float = math.inf) -> str:
        """Return the line: step, first metric, speed, time left, the last commit, and how long training waited for it.

        A line longer than `width` leaves out the wait, then the speed, then the time left: a cut number would be wrong.
        """
        wall_s = sum(one.wall_s for one in self._sums)  # With what comes between steps: speed and time left agree.
        parts = {"step": f"step {progress.step}/{self._total}"}
        for name in sort_metrics(progress.metrics)[:1]:
            parts["metric"] = f"{printable(name)} {progress.metrics[name]:.4g}"
        if progress.amount:
            parts["speed"] = _speed(sum(one.amount for one in self._sums) / max(wall_s, 1e-9), progress.unit)
        pace_s = wall_s / max(1, sum(one.steps for one in self._sums))
        parts["left"] = f"ETA {clock((self._total - progress.step) * pace_s)}"
        waited = ""
        if progress.commit:
            parts["commit"] = f"committed {progress.commit.step}"
            waited = f", waited {fine_span(progress.commit.cost_s)}"
        if len(line := " · ".join(parts.values()) + waited) <= width:
            return line
        for name in ("", "speed", "left"):
            parts.pop(name, None)
            if len(line := " · ".join(parts.values())) <= width:
                break
        return line


def print_run(out: Console, config: CheckpointConfig) -> None:
    """Print the checkpoints of a run, oldest first."""
    table = plain_table()
    newest_first = run_of(config).checkpoints()
    metrics = sort_metrics({name for checkpoint in newest_first for name in checkpoint.metrics})[:_MOST_METRICS]
    for name in ("step", *metrics, "size", "waited", "saved"):
        table.add_column(name, justify="right")
    for checkpoint in reversed(newest_first):
        table.add_row(*_cells(checkpoint, metrics))
    out.print(f"Checkpoints of {config.run_key}", style="italic")  # A table's title would be wrapped.
    out.print(table)


def print_evaluation(out: Console, result: EvaluationResult, note: str = "") -> None:
    """Print the metrics that an evaluation set measured on a checkpoint, below a title that ends with the note."""
    table = plain_table()
    names = sort_metrics(result.metrics)
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*(f"{result.metrics[name]:.4g}" for name in names))
    out.print(f"Evaluation of step {result.step}, evaluation set {result.suite}{note}", style="italic", soft_wrap=True)
    out.print(table)


def print_evaluations(out: Console, suite: str, results: Sequence[EvaluationResult]) -> None:
    """Print the metrics that an evaluation set measured on several checkpoints, by step, and the outcome of each."""
    if not results:
        out.print(f"Evaluation set {suite}: nothing to evaluate.")
        return
    table = plain_table()
    metrics = sort_metrics({name for result in results for name in result.metrics})[:_MOST_METRICS]
    for name in ("step", *metrics, "outcome"):
        table.add_column(name.replace("_", " "), justify="right")
    for result in sorted(results, key=lambda result: result.step):
        numbers = (f"{result.metrics[name]:.4g}" if name in result.metrics else "" for name in metrics)
        table.add_row(str(result.step), *numbers, _OUTCOMES[result.outcome])
    out.print(f"Evaluation set {suite}", style="italic")
    out.print(table)


class EvaluationLine(_Line):
    """Shows the evaluations of the flow in the block: one line that changes on a terminal, else one every 10 s."""

    def __init__(self, out: Console):
        super().__init__(out, evaluation_watcher, "Evaluating …", stays=False)
        self._shown_s = time.monotonic()

    def __call__(self, done: int, known: int) -> None:
        """Show how many of the evaluations known so far are done."""
        self._show(lambda width: f"{done} of {known} checkpoints evaluated")


def _cells(checkpoint: Checkpoint, metrics: Sequence[str]) -> Iterator[str]:
    yield str(checkpoint.step)
    yield from (f"{checkpoint.metrics[name]:.4g}" if name in checkpoint.metrics else "" for name in metrics)
    yield size(checkpoint.size_bytes)
    yield fine_span(checkpoint.cost_s)
    yield when(checkpoint.saved_at)[11:]


def _speed(rate: float, unit: str) -> str:
    if unit != "bytes":
        return f"{rate:,.0f} {unit}/s"
    return f"{rate / 1e6:.2f} MB/s" if rate >= 1e5 else f"{rate / 1e3:.1f} kB/s"
