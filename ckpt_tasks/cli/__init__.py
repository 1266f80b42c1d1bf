"""The command line `ckpt`: train programs; list, keep, compare and copy runs; check stores and machines.

Every verb prints a table, or one JSON object with --json, and exits with 0 only if all is well. A verb imports its
modules when it runs, so `ckpt --help` answers at once, and a verb that only reads does not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ckpt_tasks.cli.compare import diff, verify_resume
from ckpt_tasks.cli.copy import fork, sync
from ckpt_tasks.cli.doctor.verb import doctor, doctor_store, restore_drill, verify
from ckpt_tasks.cli.files import export, import_
from ckpt_tasks.cli.hub import pull, push
from ckpt_tasks.cli.keep import pin, prune, rm, rollback, unpin
from ckpt_tasks.cli.ls import ls
from ckpt_tasks.cli.report import metrics, report
from ckpt_tasks.cli.show import samples, show
from ckpt_tasks.cli.start import down, evaluate, init, train, up
from ckpt_tasks.cli.usage import explained
from ckpt_tasks.cli.watch import serve, watch
from ckpt_tasks.process import fill_standard_descriptors

__all__ = ["app", "main"]

_VERBS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Start": (init, train, evaluate, up, down),
    "Look": (ls, show, samples, watch, serve, diff, report, metrics),
    "Keep": (verify, restore_drill, verify_resume, pin, unpin, prune, rm, rollback),
    "Move": (sync, fork, export, import_, push, pull),
    "Mend": (doctor, doctor_store),
}

# Examples at the end of each verb's help.
_EXAMPLES = {
    "init": "ckpt init nets",
    "train": "ckpt train my.module:Program --steps 2000 --step-interval 100",
    "evaluate": "ckpt evaluate --run-key lm --suite full",
    "up": "ckpt up",
    "down": "ckpt down",
    "ls": "ckpt ls runs --sort=-loss",
    "show": "ckpt show runs/lm@best",
    "samples": "ckpt samples runs/lm@best",
    "watch": "ckpt watch runs/lm",
    "serve": "ckpt serve runs",
    "diff": "ckpt diff runs/lm@30 runs/lm@40 --metrics",
    "report": "ckpt report runs/lm --out lm.html",
    "metrics": "ckpt metrics runs --out /var/lib/node_exporter/ckpt.prom",
    "verify": "ckpt verify runs/lm",
    "restore-drill": "ckpt restore-drill runs/lm",
    "verify-resume": "ckpt verify-resume my.module:Program --steps 20",
    "pin": "ckpt pin runs/lm@20 -m 'the paper'",
    "unpin": "ckpt unpin runs/lm@20",
    "prune": "ckpt prune runs/lm --max-num-checkpoints 3 --dry-run",
    "rm": "ckpt rm runs/lm@10 --dry-run",
    "rollback": "ckpt rollback runs/lm@400 --skip-batches 405-414",
    "sync": "ckpt sync runs/lm s3://bucket/lm",
    "fork": "ckpt fork runs/lm@40 runs/lm-2 --param lr=1e-4",
    "export": "ckpt export runs/lm@best lm.safetensors",
    "import": "ckpt import model.pt runs/lm --step 5",
    "push": "ckpt push runs/lm@best org/lm --format peft",
    "pull": "ckpt pull org/lm weights/lm",
    "doctor": "ckpt doctor runs/lm",
    "doctor-store": "ckpt doctor-store s3://bucket/runs",
}
_SHELLS = ("bash", "zsh", "fish")
_COMPLETE_VAR = "_CKPT_COMPLETE"
# bash splits "runs/a@5" into three words, because @ is in its COMP_WORDBREAKS. So the script splits the command
# line itself, and returns only the part after the last @.
_BASH = f"""\
_ckpt_completion() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" word="" cut="" words IFS=$' \\t\\n'
    read -ra words <<< "$line"
    local at=$(( ${{#words[@]}} - 1 ))
    case "$line" in
        *[[:space:]]) at=$(( at + 1 )) ;;
        *) word="${{words[at]}}" ;;
    esac
    case "$word" in *@*) cut="${{word%"${{word##*@}}"}}" ;; esac
    IFS=$'\\n'
    COMPREPLY=( $( env COMP_WORDS="$line" COMP_CWORD=$at {_COMPLETE_VAR}=complete_bash "$1" ) )
    COMPREPLY=( "${{COMPREPLY[@]#"$cut"}}" )
    return 0
}}

complete -o default -F _ckpt_completion ckpt"""


def _print_script(context: typer.Context, shell: str | None) -> None:
    """Print the completion script that a shell runs when it starts."""
    if shell is None or context.resilient_parsing:
        return
    if shell not in _SHELLS:
        raise typer.BadParameter(f"{shell!r:.40} is not one of {', '.join(_SHELLS)}.")
    if shell == "bash":
        typer.echo(_BASH)
    else:
        from typer.completion import get_completion_script  # type: ignore[attr-defined]  # typer defines it elsewhere

        typer.echo(get_completion_script(prog_name="ckpt", complete_var=_COMPLETE_VAR, shell=shell))
    raise typer.Exit


# ── the help screens: verbs and options under headings, as plain text, so that `ckpt --help` answers at once ──


class _Verbs(TyperGroup):
    """The command with its verbs, each listed under the heading of its `rich_help_panel`."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        with explained(info_name or "ckpt", args):
            return super().make_context(info_name, args, *more, **extra)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with explained(ctx.command_path, args):
            return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> Any:
        # Drop typer's completion flags: they work only for the current shell, and write into its start-up files.
        return [one for one in super().get_params(ctx) if one.name not in ("show_completion", "install_completion")]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        verbs = [(name, verb) for name in self.list_commands(ctx) if (verb := self.get_command(ctx, name)) is not None]
        verbs = [(name, verb) for name, verb in verbs if not verb.hidden]
        width = max(len(name) for name, _ in verbs)
        limit = formatter.width - width - 6
        _write(
            formatter,
            ((_heading(verb, "Verbs"), name.ljust(width), verb.get_short_help_str(limit)) for name, verb in verbs),
        )


class _Verb(TyperCommand):
    """A verb whose options are listed under the headings of their `rich_help_panel`."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        with explained(f"ckpt {info_name}", args):
            return super().make_context(info_name, args, *more, **extra)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for option in self.get_params(ctx):
            if (record := option.get_help_record(ctx)) is not None:
                if option.param_type_name == "argument":
                    rows.append(("Arguments", option.metavar or record[0], record[1]))
                else:
                    rows.append((_heading(option, "Options"), *record))
        _write(formatter, rows)


def _heading(what: Any, default: str) -> str:
    panel = getattr(what, "rich_help_panel", None)
    return panel if isinstance(panel, str) else default


def _write(formatter: Any, rows: Iterable[tuple[str, str, str]]) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for heading, name, text in rows:
        sections.setdefault(heading, []).append((name, text))
    for heading, lines in sections.items():
        with formatter.section(heading):
            formatter.write_dl(lines)


app = typer.Typer(
    name="ckpt",
    cls=_Verbs,
    help="Train with checkpoints that survive a kill at any moment, and manage them.",
    epilog="DIR is a run directory. DIR@500 is its checkpoint of step 500, DIR@latest the newest, DIR@best the best. "
    "A run's ledger is the numbered list of its events.",
    rich_markup_mode=None,  # Plain help is printed in half the time.
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # A plain traceback can be searched and copied.
    context_settings={"help_option_names": ["-h", "--help"]},
)
for heading, verbs in _VERBS.items():
    for verb in verbs:
        settings = getattr(verb, "context_settings", None)
        named = verb.__name__.rstrip("_").replace("_", "-")
        command = app.command(
            named,
            cls=_Verb,
            rich_help_panel=heading,
            context_settings=settings,
            epilog=f"For example: {_EXAMPLES[named]}",
        )
        command(verb)


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
            callback=_print_script,
            is_eager=True,
            help=f"print the script by which {', '.join(_SHELLS[:-1])} or {_SHELLS[-1]} completes ckpt",
        ),
    ] = None,
) -> None:
    """Accept the options that come before the verb."""


def main(*verb: str) -> None:
    """Run the command line, and exit with the status of its verb."""
    fill_standard_descriptors()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # The process was started without this stream.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open until the process ends)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            # Escape the characters that the stream's encoding lacks: no name may cause a traceback.
            stream.reconfigure(errors="backslashreplace")
    try:
        os.getcwd()
    except FileNotFoundError:  # In a removed directory even importing torch would fail.
        sys.exit("error: the working directory has been removed. Change to another one.")
    app([*verb, *sys.argv[1:]], prog_name="ckpt")
