"""The command line `ckpt`: look at runs, verify, compare, copy and prune them; try stores.

Every verb prints a table for people, or one JSON object with --json, and exits with 0 only where all is well. What a
verb needs is imported when it runs: `ckpt --help` waits for nothing, and only `prune` waits for torch.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from ckpt_tasks.cli.diff import diff
from ckpt_tasks.cli.doctor import doctor
from ckpt_tasks.cli.doctor_store import doctor_store
from ckpt_tasks.cli.export import export
from ckpt_tasks.cli.fork import fork
from ckpt_tasks.cli.ls import ls
from ckpt_tasks.cli.plan import plan
from ckpt_tasks.cli.prune import prune
from ckpt_tasks.cli.report import report
from ckpt_tasks.cli.show import show
from ckpt_tasks.cli.sync import sync
from ckpt_tasks.cli.verify import verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="ckpt",
    help="Look at the checkpoints of a training run; verify, compare, export, copy, prune; try a store; plan saves.",
    epilog="DIR is a run directory. DIR@500 names a step of it, DIR@latest and DIR@best the newest and the best one.",
    rich_markup_mode=None,  # plain help: it is there in half the time
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a plain traceback can be searched for and sent
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (ls, show, verify, diff, export, plan, prune, report, sync, fork, doctor, doctor_store):
    app.command(verb.__name__.replace("_", "-"))(verb)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ckpt-tasks {version('ckpt-tasks')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="say which version this is")
    ] = False,
) -> None:
    """Take what stands before the verb."""


def main() -> None:
    """Run the command line and exit with its status."""
    app(prog_name="ckpt")
