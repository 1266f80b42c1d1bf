"""Shell completion: verbs and options by typer, run directories and DIR@STEP from local directories.

A key press never sends a request to a server. If there is nothing to complete, the shell completes file names.
"""

from __future__ import annotations

import os
import re
from typing import Any

import typer

__all__ = ["SHELLS", "complete_checkpoint", "complete_run", "print_script", "without_typers_flags"]

SHELLS = ("bash", "zsh", "fish")
_COMPLETE_VAR = "_CKPT_COMPLETE"
_STEPS_SHOWN = 100
# A shell splits, expands or runs any other name: the shell itself completes and quotes such a file name.
_PLAIN = re.compile(r"[\w./+,:%=-]+")
# bash splits "runs/a@5" into three words, because @ is in its COMP_WORDBREAKS: so words are taken from the line itself,
# and only the part after the last @ is returned.
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


def print_script(context: typer.Context, shell: str | None) -> None:
    """Print the completion script of a shell, to be run when the shell starts."""
    if shell is None or context.resilient_parsing:
        return
    if shell not in SHELLS:
        raise typer.BadParameter(f"{shell!r:.40} is not one of {', '.join(SHELLS)}.")
    if shell == "bash":
        typer.echo(_BASH)
    else:
        from typer.completion import get_completion_script  # type: ignore[attr-defined]  # of another module of typer

        typer.echo(get_completion_script(prog_name="ckpt", complete_var=_COMPLETE_VAR, shell=shell))
    raise typer.Exit


def complete_run(incomplete: str) -> list[str]:
    """Return the directories that begin with a text; [] if no run is among them."""
    if "://" in incomplete or incomplete.startswith("~"):
        return []
    begun = incomplete.rpartition("/")[2]
    before = incomplete[: len(incomplete) - len(begun)]
    try:
        with os.scandir(before or ".") as entries:
            names = sorted(e.name for e in entries if e.name.startswith(begun) and e.is_dir() and _is_shown(e, begun))
    except OSError:
        return []
    names = [name for name in names if _PLAIN.fullmatch(before + name)]
    runs = {name for name in names if os.path.isfile(os.path.join(before, name, "format.json"))}
    return [before + (name if name in runs else f"{name}/") for name in names] if runs else []


def complete_checkpoint(incomplete: str) -> list[str]:
    """Return DIR@STEP for the checkpoints of a run, newest first; run directories if the text has no @ yet."""
    directory, at, which = incomplete.rpartition("@")
    if not at or not directory or "://" in directory or not os.path.isdir(directory):
        return complete_run(incomplete)
    from ckpt_tasks.errors import CkptError
    from ckpt_tasks.reading.reading import open_run

    try:
        steps = [str(checkpoint.step) for checkpoint in open_run(directory).checkpoints()]
    except CkptError:
        return []
    names = dict.fromkeys(["latest", "best", *steps[:_STEPS_SHOWN]]) if steps else {}
    return [f"{directory}@{name}" for name in names if name.startswith(which)]


def _is_shown(entry: os.DirEntry[str], begun: str) -> bool:
    return begun.startswith(".") or not entry.name.startswith(".")


def without_typers_flags(parameters: list[Any]) -> list[Any]:
    """Drop typer's own flags, which know only the present shell and write into its start-up files."""
    return [one for one in parameters if one.name not in ("show_completion", "install_completion")]
