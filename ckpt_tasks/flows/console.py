"""The flows in a terminal: options, one live line, a table at the end, and the commands to type next."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from prefect.exceptions import ParameterTypeError, TerminationSignal
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import get_current_settings
from rich.console import Console

from ckpt_tasks.errors import CkptError, ConfigError
from ckpt_tasks.flows.screen import EvaluationLine, LiveLine, Screen, print_evaluation, print_evaluations, print_run
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.orchestration.config import position_of_run
from ckpt_tasks.orchestration.embedded import start_embedded_server
from ckpt_tasks.orchestration.evaluate import EvaluationResult, recorded_evaluation
from ckpt_tasks.reading.reading import open_run
from ckpt_tasks.session.forked import check_program, recorded_params
from ckpt_tasks.session.local import find_program
from ckpt_tasks.session.parameters import effective_params

__all__ = ["main", "main_evaluate"]

Flow = Callable[..., Any]
_PREFECT_LOGS = ("prefect", "EventsWorker", "APILogWorker")
_PROGRAM = "ckpt_tasks.programs.byte_lm:ByteLM"


def main(train: Flow, evaluate: Flow, arguments: Sequence[str] | None = None) -> int:
    """Train a run and evaluate its newest checkpoint from the command line; return the exit status, 0 if complete."""
    options = _train_options(arguments)
    out = Screen()
    with _exit_status(out, options) as status:
        config, params = _config(options), _params(options)
        check_program(config, options.program)
        factory = find_program(options.program)
        find_program(options.program, effective_params(factory, recorded_params(config), params))
        start = position_of_run(config, options.steps)
        result = _announce(out, options, start)
        if result is None:
            with _prefect(out):
                with LiveLine(out, options.steps):
                    train(
                        run_key=options.run_key,
                        total_steps=options.steps,
                        checkpoint=config,
                        program=options.program,
                        params=params,
                        batch_steps=options.batch_steps,
                    )
                [result] = evaluate(**_evaluation(options, params))
        print_run(out, config)
        print_evaluation(out, result)
        _print_next(out, options)
    return status[0]


def main_evaluate(evaluate: Flow, arguments: Sequence[str] | None = None) -> int:
    """Evaluate a checkpoint from the command line; return the exit status."""
    parser = _parser("flows.evaluate", "Evaluate committed checkpoints, each once per suite.")
    parser.add_argument(
        "--which", default="latest", help='a step, "latest", "best", or "pending": all that the suite has not evaluated'
    )
    parser.add_argument("--suite", default="quick", help="name of the evaluation (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="evaluate at most this many pending checkpoints")
    parser.add_argument("--promote", metavar="MODULE:FUNCTION", help="function to call with a new best checkpoint")
    parser.add_argument("--promote-params", default="{}", metavar="JSON", help="further arguments for that function")
    options = _finish(parser, arguments)
    out = Screen()
    with _exit_status(out, None) as status:
        asked = {name: getattr(options, name) for name in ("which", "suite", "limit", "promote")}
        asked |= {"promote_params": _object("--promote-params", options.promote_params)}
        params = _params(options)
        find_program(options.program)
        with _prefect(out), EvaluationLine(out):
            results = evaluate(**_evaluation(options, params), **asked)
        if options.which == "pending" or not results:
            print_evaluations(out, options.suite, results)
        else:
            recorded = "recorded" if results[0].new else "recorded before, nothing was changed"
            out.print(f"Step {results[0].step}, suite {options.suite}: {recorded}.")
            print_evaluation(out, results[0])
    return status[0]


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("--run-key", help="name of the run (default: from the program's name, byte-lm for ByteLM)")
    parser.add_argument("--checkpoint-dir", help="directory or URL of the run (default: runs/RUN_KEY)")
    parser.add_argument(
        "--program", default=_PROGRAM, metavar="MODULE:FACTORY", help="program of the run (default: %(default)s)"
    )
    parser.add_argument("--params", default="{}", metavar="JSON", help="arguments for the factory")
    parser.add_argument("--seed", type=int, help="argument `seed` for the factory")
    return parser


def _train_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser("flows.train", "Train a program. Run the same command again to continue where it ended.")
    parser.add_argument("--steps", type=int, default=600, help="train until this step (default: %(default)s)")
    parser.add_argument("--step-interval", type=int, default=100, help="steps from save to save (default: %(default)s)")
    parser.add_argument("--batch-steps", type=int, help="steps of one Prefect task (default: as many as take 30 s)")
    return _finish(parser, arguments)


def _finish(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    options.run_key = options.run_key or _default_key(options.program)
    options.checkpoint_dir = options.checkpoint_dir or f"runs/{options.run_key}"
    return options


def _default_key(program: str) -> str:
    """Return the default run key of a program: "pkg.module:MyModel" becomes "my-model"."""
    name = program.rpartition(":")[2].rpartition(".")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


def _config(options: argparse.Namespace) -> CheckpointConfig:
    if options.steps < 1:
        raise ConfigError(f"--steps must be 1 or more, not {options.steps}")
    return CheckpointConfig(
        checkpoint_dir=options.checkpoint_dir, run_key=options.run_key, step_interval=options.step_interval
    )


def _params(options: argparse.Namespace) -> dict[str, Any]:
    params = _object("--params", options.params)
    if options.seed is not None and params.setdefault("seed", options.seed) != options.seed:
        raise ConfigError(f"--seed is {options.seed}, and --params has the seed {params['seed']}")
    return params


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} must be a JSON object", hint=f"""For example {option} '{{"width": 128}}'.""")
    return value


def _evaluation(options: argparse.Namespace, params: dict[str, Any]) -> dict[str, Any]:
    names = ("run_key", "checkpoint_dir", "program")
    return {**{name: getattr(options, name) for name in names}, "params": params}


# ── Prefect ──────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _prefect(out: Console) -> Iterator[None]:
    """Start the embedded server if needed, and keep Prefect's log off the screen unless the user set its level."""
    if get_current_settings().api.url is None:
        out.print("Starting Prefect's embedded server …", style="dim")
    start_embedded_server()
    if "level" in get_current_settings().logging.model_fields_set:
        yield
        return
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):  # Prefect's pages still get these records
            handler.addFilter(_is_for_people)  # never removed: Prefect logs more at exit
    tasks, warnings = logging.getLogger("prefect.task_runs"), _Warnings(out)
    tasks.addHandler(warnings)
    try:
        yield
    finally:
        tasks.removeHandler(warnings)


def _is_for_people(record: logging.LogRecord) -> bool:
    """Log filter: drop Prefect's own records and our INFO records (restores, saves), which the screen shows itself."""
    if record.name.startswith("ckpt_tasks"):
        return record.levelno > logging.INFO
    return not record.name.startswith(_PREFECT_LOGS)


class _Warnings(logging.Handler):
    """Print the warnings of a flow run, such as failed attempts."""

    def __init__(self, out: Console):
        super().__init__(logging.WARNING)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            self._out.print(record.getMessage(), style="yellow", markup=False, soft_wrap=True)


class _StoppedError(BaseException):
    """SIGTERM outside a flow, or after it."""


def _raise_stopped(number: int, frame: FrameType | None) -> NoReturn:
    raise _StoppedError


@contextmanager
def _exit_status(out: Console, options: argparse.Namespace | None) -> Iterator[list[int]]:
    """Yield a list whose item becomes the exit status: 0, 1 after an error (printed), 130 or 143 after a signal."""
    status = [0]
    # Prefect forwards SIGTERM to the previous handler. The default handler would end the process at once and leave the
    # embedded server running.
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
    except ExceptionGroup as errors:  # of several evaluations
        status[0] = 1
        out.print(errors.message, style="red", markup=False, soft_wrap=True)
    except ParameterTypeError as error:
        status[0] = 1
        out.print(str(error), style="red", markup=False, soft_wrap=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    if status[0] > 1 and options is not None:
        _print_stopped(out, options)


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _announce(out: Console, options: argparse.Namespace, start: int) -> EvaluationResult | None:
    """Print the run's position; if the run is complete, return the recorded evaluation of its newest checkpoint."""
    if start < options.steps:
        out.print(f"Run {options.run_key}: {f'goes on from step {start}' if start else 'from the beginning'}.")
        return None
    out.print(f"Run {options.run_key} is complete: step {start} of {options.steps} is committed.")
    run = open_run(options.checkpoint_dir, options.run_key)
    return recorded_evaluation(run, run.find("latest"), "quick")


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
        step = position_of_run(_config(options), options.steps)
    except CkptError as error:
        out.print(f"Stopped. {error}", markup=False, soft_wrap=True)
        return
    again = shlex.join([_python(), "-m", "flows.train", *options.arguments])
    out.print(f"Stopped; step {step} is committed. The same command goes on:\n  {again}", markup=False, soft_wrap=True)


def _without(arguments: Sequence[str], *names: str) -> list[str]:
    remaining: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and not argument.startswith(tuple(f"{name}=" for name in names)) and argument not in names:
            remaining.append(argument)
        skip = not skip and argument in names
    return remaining


def _ckpt() -> str:
    return "ckpt" if shutil.which("ckpt") else os.path.relpath(Path(sys.prefix, "bin", "ckpt"))


def _python() -> str:
    return "python" if shutil.which("python") == sys.executable else os.path.relpath(Path(sys.prefix, "bin", "python"))
