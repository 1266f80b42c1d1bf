"""The flows on a terminal: options, one live line, a table at the end, and what to type next."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from prefect.exceptions import ParameterTypeError, TerminationSignal
from prefect.settings import get_current_settings
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ckpt_tasks.checkpoint.config import CheckpointConfig
from ckpt_tasks.checkpoint.reading import open_run
from ckpt_tasks.errors import CkptError, ConfigError
from ckpt_tasks.format.ledger import Checkpoint
from ckpt_tasks.gang.session import Progress, watcher
from ckpt_tasks.orchestration.config import position_of_run
from ckpt_tasks.orchestration.embedded import start_embedded_server
from ckpt_tasks.orchestration.evaluate import EvaluationResult

__all__ = ["LiveLine", "main", "main_evaluate"]

_PLAIN_EVERY_S = 10.0
Flow = Callable[..., Any]
_PROGRAM = "flows.programs.byte_lm:ByteLM"


def main(train: Flow, evaluate: Flow, arguments: Sequence[str] | None = None) -> int:
    """Train from the command line; return the exit status: 0 means that the run is complete."""
    options = _train_options(arguments)
    out = Console(highlight=False)
    with _exit_status(out, options) as status:
        config, params = _config(options), _params(options)
        start = position_of_run(config)
        if start >= options.steps:
            out.print(f"Run {options.run_key} is complete: step {start} of {options.steps} is committed.")
        else:
            out.print(f"Run {options.run_key}: {'from the beginning' if not start else f'goes on from step {start}'}.")
        _prepare_prefect(out)
        with LiveLine(out, options.steps) as line:
            token = watcher.set(line)
            try:
                train(
                    run_key=options.run_key,
                    total_steps=options.steps,
                    checkpoint=config,
                    program=options.program,
                    params=params,
                    batch_steps=options.batch_steps,
                )
            finally:
                watcher.reset(token)
        result = evaluate(**_evaluation(options, params))
        _print_run(out, config, result)
        _print_next(out, options)
    return status[0]


def main_evaluate(evaluate: Flow, arguments: Sequence[str] | None = None) -> int:
    """Evaluate a checkpoint from the command line; return the exit status."""
    parser = _parser("flows.evaluate", "Evaluate a committed checkpoint, once per suite.")
    parser.add_argument("--which", default="latest", help='a step, "latest" or "best"')
    parser.add_argument("--suite", default="quick", help="which evaluation of the program")
    options = _finish(parser, arguments)
    out = Console(highlight=False)
    with _exit_status(out, None) as status:
        params = _params(options)
        _prepare_prefect(out)
        which = int(options.which) if options.which.isdecimal() else options.which
        result = evaluate(**_evaluation(options, params), which=which, suite=options.suite)
        recorded = "recorded" if result.new else "recorded before, nothing was changed"
        out.print(f"Step {result.step}, suite {result.suite}: {recorded}.")
        out.print(_metrics_table(result))
    return status[0]


class LiveLine:
    """Show training as it goes: one line that changes on a terminal, a plain line now and then elsewhere."""

    def __init__(self, out: Console, total_steps: int):
        self._out = out
        self._total = total_steps
        self._live = Live(console=out, refresh_per_second=4, transient=False) if out.is_terminal else None
        self._pace_s: float | None = None
        self._rate: float | None = None
        self._last_s = time.monotonic()
        self._shown_s = 0.0

    def __enter__(self) -> LiveLine:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, progress: Progress) -> None:
        """Take one step in."""
        now = time.monotonic()
        wall_s, self._last_s = now - self._last_s, now
        if self._pace_s is None:  # the time before the first step is no step's
            wall_s = progress.step_s
        self._pace_s = _smooth(self._pace_s, wall_s)
        self._rate = _smooth(self._rate, progress.amount / max(progress.step_s, 1e-9))
        if self._live:
            self._live.update(Text(self.text(progress), no_wrap=True, overflow="ellipsis"))
        elif now - self._shown_s >= _PLAIN_EVERY_S or progress.step == self._total:
            self._shown_s = now
            self._out.print(self.text(progress))

    def text(self, progress: Progress) -> str:
        """Return the line: step, metrics, speed, time left, the last commit and what training waited for it."""
        parts = [f"step {progress.step}/{self._total}"]
        parts += [f"{name} {value:.4g}" for name, value in list(progress.metrics.items())[:2]]
        if progress.amount:
            parts.append(_speed(self._rate or 0.0, progress.unit))
        parts.append(f"ETA {_clock((self._total - progress.step) * (self._pace_s or 0.0))}")
        if progress.commit:
            parts.append(f"committed {progress.commit.step} in {progress.commit.cost_s:.2f} s")
        return " · ".join(parts)


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=about)
    parser.add_argument("--run-key", default="byte-lm", help="names the run (default: %(default)s)")
    parser.add_argument("--checkpoint-dir", help="its directory (default: runs/RUN_KEY)")
    parser.add_argument("--program", default=_PROGRAM, metavar="MODULE:FACTORY", help="default: %(default)s")
    parser.add_argument("--params", default="{}", metavar="JSON", help="arguments of the factory")
    parser.add_argument("--seed", type=int, help="the argument `seed` of the factory")
    return parser


def _train_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser("flows.train", "Train a program; started again, the same command goes on where it ended.")
    parser.add_argument("--steps", type=int, default=1000, help="train until this step (default: %(default)s)")
    parser.add_argument("--step-interval", type=int, default=100, help="save every so many steps (default: %(default)s)")
    parser.add_argument("--batch-steps", type=int, help="steps of one Prefect task (default: as many as take 30 s)")
    return _finish(parser, arguments)


def _finish(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    options.checkpoint_dir = options.checkpoint_dir or f"runs/{options.run_key}"
    return options


def _config(options: argparse.Namespace) -> CheckpointConfig:
    if options.steps < 1:
        raise ConfigError(f"--steps must be 1 or more, not {options.steps}")
    return CheckpointConfig(
        checkpoint_dir=options.checkpoint_dir, run_key=options.run_key, step_interval=options.step_interval
    )


def _params(options: argparse.Namespace) -> dict[str, Any]:
    try:
        params = json.loads(options.params)
    except ValueError as error:
        raise ConfigError(f"--params is no JSON: {error}") from error
    if not isinstance(params, dict):
        raise ConfigError("--params must be a JSON object", hint="""For example --params '{"width": 128}'.""")
    if options.seed is not None and params.setdefault("seed", options.seed) != options.seed:
        raise ConfigError(f"--seed is {options.seed}, and --params has the seed {params['seed']}")
    return params


def _evaluation(options: argparse.Namespace, params: dict[str, Any]) -> dict[str, Any]:
    names = ("run_key", "checkpoint_dir", "program")
    return {**{name: getattr(options, name) for name in names}, "params": params}


# ── Prefect ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _prepare_prefect(out: Console) -> None:
    """Start the embedded server if one is needed, and keep Prefect's log off the screen unless its level was set."""
    if "level" not in get_current_settings().logging.model_fields_set:
        prefect_log = logging.getLogger("prefect")
        for handler in prefect_log.handlers:
            handler.setLevel(logging.CRITICAL)
        for name in ("prefect", "prefect.flow_runs", "prefect.task_runs"):
            logger = logging.getLogger(name)
            for handler in logger.handlers:
                if isinstance(handler, logging.StreamHandler):
                    handler.setLevel(logging.CRITICAL)
        logging.getLogger("prefect.task_runs").addHandler(_Warnings(out))
    if get_current_settings().api.url is None:
        out.print("Starting Prefect's embedded server …", style="dim")
    start_embedded_server()


class _Warnings(logging.Handler):
    """Print the warnings of a flow run: failed attempts."""

    def __init__(self, out: Console):
        super().__init__(logging.WARNING)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            self._out.print(record.getMessage(), style="yellow", markup=False)


class _StoppedError(BaseException):
    """SIGTERM, outside of a flow or after it."""


def _raise_stopped(number: int, frame: FrameType | None) -> NoReturn:
    raise _StoppedError


@contextmanager
def _exit_status(out: Console, options: argparse.Namespace | None) -> Iterator[list[int]]:
    """Turn what ends the block into an exit status and one line: 0, 1 for our errors, 130 and 143 for signals."""
    status = [0]
    # Prefect hands the signal on to whoever had it before: with the default handler the process would end at once, and
    # leave the embedded server behind.
    before = signal.signal(signal.SIGTERM, _raise_stopped)
    try:
        yield status
    except KeyboardInterrupt:
        status[0] = 130
    except (TerminationSignal, _StoppedError):
        status[0] = 143
    except CkptError as error:
        status[0] = 1
        out.print(f"{type(error).__name__}: {error}", style="red", markup=False, soft_wrap=True)
    except ParameterTypeError as error:
        status[0] = 1
        out.print(str(error), style="red", markup=False, soft_wrap=True)
    except Exception:
        status[0] = 1
        out.print_exception()
    finally:
        signal.signal(signal.SIGTERM, before)
    if status[0] > 1 and options is not None:
        _print_stopped(out, options)


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _print_run(out: Console, config: CheckpointConfig, result: EvaluationResult) -> None:
    table = Table(title=f"Checkpoints of {config.run_key}", title_justify="left")
    newest_first = open_run(config.checkpoint_dir, config.run_key).checkpoints()
    metrics = list(dict.fromkeys(name for one in newest_first for name in one.metrics))
    for name in ("step", *metrics, "size", "training waited", "saved"):
        table.add_column(name, justify="right")
    for one in reversed(newest_first):
        table.add_row(*_cells(one, metrics))
    out.print(table, _metrics_table(result))


def _cells(one: Checkpoint, metrics: Sequence[str]) -> Iterator[str]:
    yield str(one.step)
    yield from (f"{one.metrics[name]:.4g}" if name in one.metrics else "" for name in metrics)
    yield f"{one.size_bytes / 2**20:.1f} MiB"
    yield f"{one.cost_s:.2f} s"
    yield one.saved_at.replace("T", " ")[:19]


def _metrics_table(result: EvaluationResult) -> Table:
    table = Table(title=f"Evaluation {result.suite} of step {result.step}", title_justify="left")
    for name in result.metrics:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*(f"{value:.4g}" for value in result.metrics.values()))
    return table


def _print_next(out: Console, options: argparse.Namespace) -> None:
    place = options.checkpoint_dir
    further = [*_without(options.arguments, "--steps"), "--steps", str(2 * options.steps)]
    evaluation = _without(options.arguments, "--steps", "--step-interval", "--batch-steps")
    out.print("Next:")
    for command in (
        [_ckpt(), "ls", place],
        [_ckpt(), "verify", place],
        [_python(), "-m", "flows.train", *further],
        [_python(), "-m", "flows.evaluate", *evaluation, "--suite", "full"],
    ):
        out.print(f"  {shlex.join(command)}", markup=False, soft_wrap=True)


def _print_stopped(out: Console, options: argparse.Namespace) -> None:
    try:
        step = position_of_run(_config(options))
    except CkptError as error:
        out.print(f"Stopped. {error}", markup=False, soft_wrap=True)
        return
    again = shlex.join([_python(), "-m", "flows.train", *options.arguments])
    out.print(f"Stopped; step {step} is committed. The same command goes on:\n  {again}", markup=False, soft_wrap=True)


def _without(arguments: Sequence[str], *names: str) -> list[str]:
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and not argument.startswith(tuple(f"{name}=" for name in names)) and argument not in names:
            kept.append(argument)
        skip = not skip and argument in names
    return kept


def _ckpt() -> str:
    return "ckpt" if shutil.which("ckpt") else os.path.relpath(Path(sys.prefix, "bin", "ckpt"))


def _python() -> str:
    return "python" if shutil.which("python") == sys.executable else os.path.relpath(Path(sys.prefix, "bin", "python"))


def _smooth(mean: float | None, value: float) -> float:
    return value if mean is None else mean + 0.05 * (value - mean)


def _speed(rate: float, unit: str) -> str:
    if unit != "bytes":
        return f"{rate:,.0f} {unit}/s"
    return f"{rate / 1e6:.2f} MB/s" if rate >= 1e5 else f"{rate / 1e3:.1f} kB/s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
