"""Arguments of verbs: a run or a checkpoint, completed by the shell, and options that several verbs share.

Run directories and DIR@STEP are completed from local directories: a key press never sends a request to a server. If
there is nothing to complete, the shell completes file names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ckpt_tasks.ledger.targets import split_target

if TYPE_CHECKING:
    from ckpt_tasks.format.ledger import State
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.reading.reading import Run

_STEPS_SHOWN = 100
# Other names would be split, expanded or run by the shell: leave their completion and quoting to the shell.
_PLAIN = re.compile(r"[\w./+,:%=-]+")


def argument(metavar: str, about: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    """Declare an argument of a verb."""
    return typer.Argument(metavar=metavar, help=about, show_default=False, autocompletion=complete)


def option(flags: str, metavar: str | None, about: str, **more: Any) -> Any:
    """Declare an option of a verb; without a metavar it is a flag."""
    return typer.Option(*flags.split(), metavar=metavar, help=about, **more)


def complete_run(incomplete: str) -> list[str]:
    """Return the directories that begin with a text; [] if none of them is a run."""
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
    """Return DIR@STEP for the checkpoints of a run, newest first, or run directories if the text has no @ yet."""
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


def _of_run(otherwise: str) -> Any:
    return argument("DIR[@STEP]", f"a step, @latest or @best; {otherwise} if none is named", complete_checkpoint)


RunArgument = Annotated[str, argument("DIR", "a run directory", complete_run)]
CheckpointArgument = Annotated[str, _of_run("the latest")]
RunOrCheckpointArgument = Annotated[str, _of_run("the whole run")]
OneArgument = Annotated[str, argument("DIR@STEP", "a step of a run, @latest or @best", complete_checkpoint)]
KeyOption = Annotated[str | None, option("--run-key", "KEY", "key of the new run [default: the last part of TO]")]
SingleOption = Annotated[
    bool, option("--single-writer", None, "TO has no put-if-absent; you make sure that no other process writes there")
]
DryOption = Annotated[bool, option("--dry-run", None, "only print what would happen")]
JsonOption = Annotated[bool, option("--json", None, "print one JSON object instead of tables")]


class Target(NamedTuple):
    """A run directory and a checkpoint: a step, "latest", "best", or None if the user named none."""

    checkpoint_dir: str
    which: int | str | None

    def open(self) -> Run:
        """Open the run of the target; raise CheckpointNotFoundError if there is none."""
        from ckpt_tasks.reading.reading import open_run

        return open_run(self.checkpoint_dir)

    def find(self) -> tuple[Run, Checkpoint]:
        """Open the run and find the checkpoint: the latest if no step is named.

        Raises CheckpointNotFoundError if there is no such run or checkpoint, ConfigError if "best" has no metric.
        """
        run = self.open()
        return run, run.find("latest" if self.which is None else self.which)


def parse_target(text: str) -> Target:
    """Split "DIR@STEP" at its last @, unless a directory has the whole text as its name.

    Raises ConfigError if the text after the @ is neither a step nor "latest" nor "best".
    """
    return Target(*split_target(text))


def written(value: Any) -> str:
    """Write a parameter's value in the form that --set takes."""
    return json.dumps(value)


def params_line(params: Mapping[str, Any]) -> str:
    """Write a program's parameters in one line."""
    return ", ".join(f"{name}={written(value)}" for name, value in params.items())


def lineage_facts(state: State) -> dict[str, Any]:
    """Return a run's parameters, and the run from which it was forked (None: no fork), as --json prints them."""
    origin, params = state.origin, state.params
    return {"origin": None if origin is None else vars(origin), "params": None if params is None else dict(params)}
