"""`ckpt train`: train a program in this process, as a flow; the same command resumes it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tasks.cli.output import JsonOption, Output, report_errors
from ckpt_tasks.cli.settings import (
    EXAMPLE,
    ParamOption,
    ParamsOption,
    ProgramArgument,
    ProgramOption,
    SeedOption,
    ckpt_command,
    config_of,
    importing_prefect,
    params_of,
    repeated_command,
    with_config_options,
)
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.system import gang_rank

if TYPE_CHECKING:
    from ckpt_tasks.ledger.config import CheckpointConfig

__all__ = ["train"]

StepsOption = Annotated[int, typer.Option("--steps", metavar="N", help="train until this step")]
BatchStepsOption = Annotated[
    int | None,
    typer.Option("--batch-steps", metavar="N", help="steps in one Prefect task [default: as many as take 30 s]"),
]
ForkOption = Annotated[
    str | None,
    typer.Option("--fork-from", metavar="DIR@STEP", help="begin with this checkpoint of another run"),
]


@with_config_options
def train(
    ctx: typer.Context,
    program: ProgramArgument = None,
    *,
    steps: StepsOption = 600,
    param: ParamOption = [],  # noqa: B006 (typer copies it)
    params: ParamsOption = "{}",
    seed: SeedOption = None,
    batch_steps: BatchStepsOption = None,
    fork_from: ForkOption = None,
    as_json: JsonOption = False,
    named: ProgramOption = None,
    **settings: str | None,
) -> None:
    """Train a program; the same command resumes it.

    MODULE:PROGRAM is a class, or a function that returns an object, with `state`, `train_step()` and `evaluate(suite)`.
    The working directory is searched for the module first. `ckpt init` writes a program to start from.
    """
    name = program or named or EXAMPLE
    with report_errors(as_json) as out:
        if steps < 1:
            raise ConfigError(f"--steps must be 1 or more, not {steps}")
        if of_gang := gang_rank():
            raise ConfigError(
                f"{of_gang}, and ckpt train trains in one process",
                hint="Start it without torchrun, or use a Checkpointer in a script of your own.",
            )
        config, given = config_of(settings, name), params_of(param, params, seed)
        with importing_prefect():
            from ckpt_tasks.flows.console import Training, train_in_terminal

        training = Training(
            program=name, config=config, steps=steps, params=given, batch_steps=batch_steps, fork_from=fork_from
        )
        done = train_in_terminal(training, again=shlex.join(repeated_command(ctx)), stderr=as_json)
        out.data(done.facts())
        if done.status == 0:
            _print_next(out, ctx, config, steps)
    raise typer.Exit(done.status)


def _print_next(out: Output, ctx: typer.Context, config: CheckpointConfig, steps: int) -> None:
    place = str(config.checkpoint_dir)
    kept = ("checkpoint_dir", "run_key", "param", "params", "seed", "program", "named")
    without = [str(parameter.name) for parameter in ctx.command.params if parameter.name not in kept]
    evaluation = repeated_command(ctx, without=without)
    evaluation[1] = "evaluate"
    commands = (
        [ckpt_command(), "ls", place],
        [ckpt_command(), "report", place],
        repeated_command(ctx, without=("as_json",), steps=2 * steps),
        [*evaluation, "--suite", "full"],
    )
    out.print_next(*map(shlex.join, commands))
