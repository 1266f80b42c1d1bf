"""`ckpt evaluate`: evaluate committed checkpoints in this process, each once per suite."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tasks.cli.output import JsonOption, report_errors
from ckpt_tasks.cli.settings import (
    EXAMPLE,
    ParamOption,
    ParamsOption,
    ProgramArgument,
    ProgramOption,
    SeedOption,
    config_of,
    importing_prefect,
    json_object,
    params_of,
)
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError

if TYPE_CHECKING:
    from ckpt_tasks.ledger.config import CheckpointConfig

__all__ = ["evaluate"]

WhichOption = Annotated[
    str,
    typer.Option(
        "--which",
        metavar="STEP|WORD",
        help='a step, "latest", "best", or "pending": each that the suite has not evaluated',
    ),
]
SuiteOption = Annotated[str, typer.Option("--suite", metavar="NAME", help="name of the evaluation")]
LimitOption = Annotated[
    int | None, typer.Option("--limit", metavar="N", help="evaluate at most this many pending checkpoints")
]
PromoteOption = Annotated[
    str | None,
    typer.Option("--promote", metavar="MODULE:FUNCTION", help="call this function with each new best checkpoint"),
]
PromoteParamsOption = Annotated[
    str, typer.Option("--promote-params", metavar="JSON", help="more arguments for that function")
]
RunKeyOption = Annotated[
    str | None,
    typer.Option("--run-key", metavar="NAME", help="name of the run [default: the program's: byte-lm for ByteLM]"),
]
DirectoryOption = Annotated[
    str | None, typer.Option("--checkpoint-dir", metavar="DIR", help="where the run lives [default: runs/RUN_KEY]")
]


def evaluate(
    program: ProgramArgument = None,
    *,
    which: WhichOption = "latest",
    suite: SuiteOption = "quick",
    run_key: RunKeyOption = None,
    checkpoint_dir: DirectoryOption = None,
    limit: LimitOption = None,
    promote: PromoteOption = None,
    promote_params: PromoteParamsOption = "{}",
    param: ParamOption = [],  # noqa: B006 (typer copies it)
    params: ParamsOption = "{}",
    seed: SeedOption = None,
    as_json: JsonOption = False,
    named: ProgramOption = None,
) -> None:
    """Evaluate committed checkpoints, each once per suite.

    Restores the checkpoint, calls the program's `evaluate(suite)` and records the result in the run.
    """
    name = program or named or EXAMPLE
    with report_errors(as_json) as out:
        config = config_of({"run_key": run_key, "checkpoint_dir": checkpoint_dir}, name)
        asked = {"limit": limit, "promote": promote, "promote_params": json_object("--promote-params", promote_params)}
        given = params_of(param, params, seed)
        if not (program or named):
            _check_example(config)
        with importing_prefect():
            from ckpt_tasks.flows.console import evaluate_in_terminal

        done = evaluate_in_terminal(config, name, stderr=as_json, suite=suite, which=which, params=given, **asked)
        out.data(done.facts())
    raise typer.Exit(done.status)


def _check_example(config: CheckpointConfig) -> None:
    """Raise ConfigError if no program is named and the run trains another one than the example."""
    from ckpt_tasks.reading.reading import run_of
    from ckpt_tasks.session.forked import trains

    with suppress(CheckpointNotFoundError):
        state = run_of(config).head().state
        if not trains(state, EXAMPLE):
            raise ConfigError(
                f"no program is named, and the run trains {state.program}",
                hint=f"Name it: ckpt evaluate {state.program} …",
            )
