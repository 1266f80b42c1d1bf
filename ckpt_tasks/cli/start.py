"""`ckpt init`, `train`, `evaluate`, `up` and `down`: a project, its training, and its server and worker."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.arguments import (
    EXAMPLE,
    JsonOption,
    ParamOption,
    ParamsOption,
    ProgramArgument,
    ProgramOption,
    SeedOption,
    argument,
    ckpt_command,
    complete_checkpoint,
    config_of_options,
    importing_prefect,
    json_object,
    named_program,
    option,
    params_of,
    repeated_command,
    with_config_options,
)
from ckpt_tasks.cli.output import Output, column, listing, output, report_errors
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError
from ckpt_tasks.gc_pause import gc_paused
from ckpt_tasks.logs import shown_meanwhile
from ckpt_tasks.system import gang_rank

if TYPE_CHECKING:
    from ckpt_tasks.flows.gang.launched import LaunchedPlace
    from ckpt_tasks.run.ledger.config import CheckpointConfig

DirectoryArgument = Annotated[Path, argument("DIR", "a new or empty directory")]
NameOption = Annotated[
    str | None, option("--name", "NAME", "name of the run and the deployments [default: that of DIR]")
]
StepsOption = Annotated[int, option("--steps", "N", "train until this step")]
BatchStepsOption = Annotated[
    int | None, option("--batch-steps", "N", "steps in one Prefect task [default: as many as take 30 s]")
]
RanksOption = Annotated[
    int, option("--ranks", "N", "processes that train together, for a program with DDP, FSDP or the like")
]
EngineOption = Annotated[
    str, option("--engine", "NAME", "what starts them: local (on this host), ray (RAY_ADDRESS), or block://NAME")
]
MinRanksOption = Annotated[
    int | None, option("--min-ranks", "N", "with Ray: train on so many while its cluster has no room for all")
]
ForkOption = Annotated[
    str | None,
    option(
        "--fork-from",
        "DIR@STEP",
        "begin with this checkpoint of another run; a fork that exists is resumed",
        autocompletion=complete_checkpoint,
    ),
]
WhichOption = Annotated[
    str,
    option("--which", "STEP|WORD", 'a step, "latest", "best", or "pending": each that the set has not evaluated'),
]
SuiteOption = Annotated[str, option("--suite", "NAME", "name of the evaluation set")]
LimitOption = Annotated[int | None, option("--limit", "N", "with --which pending: evaluate at most this many")]
PromoteOption = Annotated[
    str | None, option("--promote", "MODULE:FUNCTION", "call this function with each new best checkpoint")
]
PromoteParamsOption = Annotated[str, option("--promote-params", "JSON", "more arguments for that function")]
RunKeyOption = Annotated[
    str | None, option("--run-key", "NAME", "name of the run [default: the program's: byte-lm for ByteLM]")
]
PlaceOption = Annotated[str | None, option("--checkpoint-dir", "DIR", "where the run lives [default: runs/RUN_KEY]")]
SystemdOption = Annotated[bool, option("--systemd", None, "print units of systemd for server and worker")]
PortOption = Annotated[
    int | None, option("--port", "N", "port of the server [default: Prefect's own, 4200]", min=1, max=65535)
]

_ABOUT = {
    "training.py": "the program: your data and your model go here",
    "test_resume.py": "kills it, resumes it, and compares every bit",
    "prefect.yaml": "what `ckpt up` deploys",
    "README.md": "the commands",
    ".gitignore": "",
}
_GONE = ("ended", "was gone")
_PARTS = (column("part", "name", whole=True), column("state", "status"), column("", "about"))


def init(directory: DirectoryArgument, *, name: NameOption = None, as_json: JsonOption = False) -> None:
    """Write a project that runs at once.

    The project has a program with a small example of a model and its data, which you replace; deployments; and a test
    that kills the training and resumes it. DIR must be new or empty.
    """
    from ckpt_tasks.flows.site.project import PROGRAM, write_project

    with output(as_json) as out:
        named, written = write_project(directory, name)
        facts = {"name": named, "directory": str(directory.absolute()), "program": PROGRAM, "files": written}
        width = max(map(len, written))
        lines = [f"  {file.ljust(width)}  {_ABOUT[file]}".rstrip() for file in written]
        out.answer(facts, [f"{named}: a project in {directory}", *lines])
        there = [] if directory.absolute() == Path.cwd() else [f"cd {shlex.quote(str(directory))}"]
        ckpt = ckpt_command() if os.sep not in ckpt_command() else os.path.abspath(ckpt_command())
        out.print_next(*there, f"{ckpt} train {PROGRAM} --run-key {named} --steps 3000", f"{ckpt} up")


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
    ranks: RanksOption = 1,
    engine: EngineOption = "local",
    min_ranks: MinRanksOption = None,
    fork_from: ForkOption = None,
    as_json: JsonOption = False,
    named: ProgramOption = None,
    **settings: str | None,
) -> None:
    """Train a program; the same command resumes it.

    MODULE:PROGRAM is a class, or a function that returns an object, with `state`, `train_step()` and `evaluate(suite)`.
    Python looks for the module in the working directory first. `ckpt init` writes a program to start from.
    """
    from ckpt_tasks.flows.prefect.config import check_saves, config_of_run

    with report_errors(as_json) as out:
        name = named_program(program, named)
        if steps < 1:
            raise ConfigError(f"--steps must be 1 or more, not {steps}")
        if (of_gang := gang_rank()) and (ranks != 1 or engine != "local"):
            raise ConfigError(f"{of_gang}, which a launcher has started: leave --ranks and --engine out")
        config, given = config_of_options(settings, name), params_of(param, params, seed)
        check_saves(config)
        place = _place() if of_gang else None
        if place and place.rank:
            raise typer.Exit(place.follow(config_of_run(config, str(config.run_key)), name, given))
        with _starting(as_json):
            from ckpt_tasks.flows.console import TerminalTraining, train_in_terminal

        training = TerminalTraining(
            program=name,
            config=config,
            steps=steps,
            params=given,
            batch_steps=batch_steps,
            ranks=place.size if place else ranks,
            engine=engine,
            min_ranks=min_ranks,
            fork_from=fork_from,
            place=place,
        )
        done = train_in_terminal(training, again=shlex.join(repeated_command(ctx)), stderr=as_json)
        out.answer(done.facts())
        if done.status == 0 and not place:
            _print_next(out, ctx, config, steps)
    raise typer.Exit(done.status)


@contextmanager
def _starting(as_json: bool) -> Iterator[None]:
    """Begin Prefect's embedded server if one is needed, and say on a terminal that the block's imports take seconds."""
    text = "Importing Prefect and PyTorch …"
    with shown_meanwhile(text, sys.stderr if as_json else sys.stdout), importing_prefect(), gc_paused():
        from ckpt_tasks.flows.prefect.embedded import begin_embedded_server

        begin_embedded_server()  # The server starts while our own imports run, which take as long.
        yield


def _place() -> LaunchedPlace | None:
    """Return the place that a launcher gave to this process; None without a launcher."""
    from ckpt_tasks.flows.gang.launched import LaunchedPlace

    return LaunchedPlace.find()


def _print_next(out: Output, ctx: typer.Context, config: CheckpointConfig, steps: int) -> None:
    place = str(config.checkpoint_dir)
    kept = ("checkpoint_dir", "run_key", "param", "params", "seed", "program", "named", "ranks", "engine")
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


def evaluate(
    program: ProgramArgument = None,
    *,
    which: WhichOption = "latest",
    suite: SuiteOption = "quick",
    run_key: RunKeyOption = None,
    checkpoint_dir: PlaceOption = None,
    limit: LimitOption = None,
    promote: PromoteOption = None,
    promote_params: PromoteParamsOption = "{}",
    ranks: RanksOption = 1,
    engine: EngineOption = "local",
    param: ParamOption = [],  # noqa: B006 (typer copies it)
    params: ParamsOption = "{}",
    seed: SeedOption = None,
    as_json: JsonOption = False,
    named: ProgramOption = None,
) -> None:
    """Evaluate a run's checkpoints, each once per evaluation set.

    Restores the checkpoint, calls the program's `evaluate(suite)` and records the result in the run.
    """
    from ckpt_tasks.flows.prefect.config import check_evaluation, check_ranks

    with report_errors(as_json) as out:
        name = named_program(program, named)
        config = config_of_options({"run_key": run_key, "checkpoint_dir": checkpoint_dir}, name)
        asked: dict[str, Any] = {
            "limit": limit,
            "promote": promote,
            "promote_params": json_object("--promote-params", promote_params),
        }
        given = params_of(param, params, seed)
        check_evaluation(which, **asked)
        check_ranks(ranks, engine)
        asked |= {"ranks": ranks, "engine": engine}
        if program is None and named is None:
            check_example(config)
        with _starting(as_json):
            from ckpt_tasks.flows.console import evaluate_in_terminal

        done = evaluate_in_terminal(config, name, stderr=as_json, suite=suite, which=which, params=given, **asked)
        out.answer(done.facts())
    raise typer.Exit(done.status)


def check_example(config: CheckpointConfig) -> None:
    """Raise ConfigError if the run trains another program than the example, which is the default program."""
    from ckpt_tasks.checkpoint.restore.reading import run_of
    from ckpt_tasks.flows.session.forked import trains

    with suppress(CheckpointNotFoundError):
        state = run_of(config).head().state
        if not trains(state, EXAMPLE):
            raise ConfigError(
                f"no program is named, and the run trains {state.program}",
                hint=f"Name it: ckpt evaluate {state.program} …",
            )


def up(*, port: PortOption = None, systemd: SystemdOption = False, as_json: JsonOption = False) -> None:
    """Start a Prefect server, a worker and the deployments here.

    Leaves running parts alone; the same command restarts parts that died. Deploys what prefect.yaml in the working
    directory lists, or else the example. Returns when server and worker answer. The server asks for a password, in a
    file that only you can read. Uses the server that PREFECT_API_URL names, if any; `ckpt down` stops only what `ckpt
    up` started. With --systemd it starts nothing, and prints the units that keep both running, also after a reboot.
    """
    with report_errors(as_json) as out:
        if not systemd:
            out.print("Starting what does not run yet. On a busy machine it takes some minutes.")
        with importing_prefect():
            from ckpt_tasks.flows.site.prefect_server import local_url
            from ckpt_tasks.flows.site.site import bring_up
            from ckpt_tasks.flows.site.systemd import units
        if systemd:
            texts = units(Path.cwd(), local_url(port))
            out.answer(texts, [])
            if not as_json:  # A unit's lines must not wrap.
                typer.echo("\n".join(f"# ~/.config/systemd/user/{name}\n{text}" for name, text in texts.items()))
            names = " ".join(name.removesuffix(".service") for name in texts)
            out.print_next(f"systemctl --user enable --now {names}", "loginctl enable-linger")
            return

        site = bring_up(Path.cwd(), port, out.print)
        facts = {**asdict(site), "deployments": list(site.deployments)}
        asks = f"; it asks for the password in {file}" if (file := site.password_file) else ""
        alone = f"The trainings, without evaluations and checks: {site.trainings}"
        out.answer(facts, [listing(_PARTS, site.parts), f"The page is at {site.page}{asks}", alone, ""])
        train = next((name for name in site.deployments if name.startswith("train/")), site.deployments[0])
        out.print_next(
            f"export PREFECT_API_URL={site.url}",
            *([f'export PREFECT_API_AUTH_STRING="$(cat {shlex.quote(file)})"'] if file else []),
            f"prefect deployment run '{train}' --watch",
            f"{ckpt_command()} down",
        )


def down(*, as_json: JsonOption = False) -> None:
    """Stop what `ckpt up` started.

    Running training finishes its step, commits, and resumes with the next `ckpt up`. Also cleans up after a reboot or a
    kill.
    """
    with report_errors(as_json) as out:
        with importing_prefect():
            from ckpt_tasks.flows.site.site import take_down

        parts = take_down(out.print)
        shown: Any = listing(_PARTS, parts) if parts else "Nothing of ckpt up is there to end."
        out.answer({"parts": [asdict(part) for part in parts]}, [shown])
        ours = [name for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING") if name in os.environ]
        if ours and any(part.name == "server" and part.status in _GONE for part in parts):
            out.print_next(f"unset {' '.join(ours)}")
