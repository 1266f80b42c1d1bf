"""The command line `ckpt`: train programs; list, keep, compare and copy runs; check stores and machines.

Every verb prints a table, or one JSON object with --json, and exits with 0 only if all is well. A verb imports what it
needs when it runs: `ckpt --help` answers at once, and a verb that only reads does not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from ckpt_tasks.cli.completion import SHELLS, print_script
from ckpt_tasks.cli.diff import diff
from ckpt_tasks.cli.doctor import doctor
from ckpt_tasks.cli.doctor_store import doctor_store
from ckpt_tasks.cli.evaluate import evaluate
from ckpt_tasks.cli.export import export
from ckpt_tasks.cli.fork import fork
from ckpt_tasks.cli.help_screen import SectionedCommand, SectionedGroup
from ckpt_tasks.cli.importing import import_
from ckpt_tasks.cli.init import init
from ckpt_tasks.cli.ls import ls
from ckpt_tasks.cli.pin import pin, rm, unpin
from ckpt_tasks.cli.plan import plan
from ckpt_tasks.cli.prune import prune
from ckpt_tasks.cli.report import report
from ckpt_tasks.cli.rollback import rollback
from ckpt_tasks.cli.show import show
from ckpt_tasks.cli.sync import sync
from ckpt_tasks.cli.train import train
from ckpt_tasks.cli.up import down, up
from ckpt_tasks.cli.verify import verify
from ckpt_tasks.cli.verify_resume import verify_resume
from ckpt_tasks.cli.watch import watch
from ckpt_tasks.state.processes import fill_standard_descriptors

__all__ = ["app", "main"]

_VERBS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Start": (init, train, evaluate, up, down),
    "Look": (ls, show, watch, diff, report, plan),
    "Keep": (verify, verify_resume, pin, unpin, prune, rm, rollback),
    "Move": (sync, fork, export, import_),
    "Mend": (doctor, doctor_store),
}

app = typer.Typer(
    name="ckpt",
    cls=SectionedGroup,
    help="Train with checkpoints that survive a kill at any moment, and manage them.",
    epilog="DIR is a run directory. DIR@500 is its checkpoint of step 500, DIR@latest the newest, DIR@best the best.",
    rich_markup_mode=None,  # plain help: it is there in half the time
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a plain traceback can be searched for and sent
    context_settings={"help_option_names": ["-h", "--help"]},
)
for heading, verbs in _VERBS.items():
    for verb in verbs:
        app.command(verb.__name__.rstrip("_").replace("_", "-"), cls=SectionedCommand, rich_help_panel=heading)(verb)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ckpt-tasks {version('ckpt-tasks')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
    completion_shell: Annotated[
        str | None,
        typer.Option(
            "--show-completion",
            metavar="SHELL",
            callback=print_script,
            is_eager=True,
            help=f"print the script by which {', '.join(SHELLS[:-1])} or {SHELLS[-1]} completes ckpt",
        ),
    ] = None,
) -> None:
    """Take the options that come before the verb."""


def main(*verb: str) -> None:
    """Run the command line, or one verb of it, and exit with its status."""
    fill_standard_descriptors()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started without it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the process ends)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # no name or sign is worth a traceback on an ASCII terminal
    try:
        os.getcwd()
    except FileNotFoundError:  # torch is not even imported there
        sys.exit("error: the working directory has been removed. Change to another one.")
    app([*verb, *sys.argv[1:]], prog_name="ckpt")
