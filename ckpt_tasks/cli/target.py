"""What the user points at: a run directory, and perhaps one checkpoint of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ckpt_tasks.errors import ConfigError

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.reading import Run
    from ckpt_tasks.format.ledger import Checkpoint

__all__ = ["CheckpointArgument", "RunArgument", "Target", "parse_target"]

RunArgument = Annotated[str, typer.Argument(metavar="DIR", help="a run directory", show_default=False)]
CheckpointArgument = Annotated[
    str,
    typer.Argument(metavar="DIR[@STEP]", help="a step, @latest or @best; without one the latest", show_default=False),
]


class Target(NamedTuple):
    """A run directory, and which checkpoint: a step, "latest", "best", or None where none was named."""

    checkpoint_dir: str
    which: int | str | None

    def open(self) -> Run:
        """Open the run; raise CheckpointNotFoundError where there is none."""
        from ckpt_tasks.checkpoint.reading import open_run

        return open_run(self.checkpoint_dir)

    def find(self) -> tuple[Run, Checkpoint]:
        """Open the run and find the checkpoint; without one named, the latest."""
        run = self.open()
        return run, run.find("latest" if self.which is None else self.which)


def parse_target(text: str) -> Target:
    """Take "DIR@STEP" apart at its last @; a directory of that whole name, if there is one, is meant as it stands.

    Raises ConfigError where what follows the @ is neither a step nor "latest" nor "best".
    """
    directory, at, which = text.rpartition("@")
    if not at or not directory or os.path.isdir(text):
        return Target(text, None)
    if which in ("latest", "best"):
        return Target(directory, which)
    if which.isascii() and which.isdecimal():
        return Target(directory, int(which))
    raise ConfigError(
        f"{text!r} names neither a directory nor a checkpoint", hint="Write DIR@500, DIR@latest or DIR@best."
    )
