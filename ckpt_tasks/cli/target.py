"""What the user points at: a run directory, and perhaps one checkpoint of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ckpt_tasks.ledger.targets import split_target

if TYPE_CHECKING:
    from ckpt_tasks.format.ledger import Checkpoint
    from ckpt_tasks.reading.reading import Run

__all__ = ["CheckpointArgument", "RunArgument", "RunOrCheckpointArgument", "Target", "parse_target"]

RunArgument = Annotated[str, typer.Argument(metavar="DIR", help="a run directory", show_default=False)]


def _of_run(otherwise: str) -> Any:
    help_text = f"a step, @latest or @best; without one {otherwise}"
    return typer.Argument(metavar="DIR[@STEP]", help=help_text, show_default=False)


CheckpointArgument = Annotated[str, _of_run("the latest")]
RunOrCheckpointArgument = Annotated[str, _of_run("the whole run")]


class Target(NamedTuple):
    """A run directory, and which checkpoint: a step, "latest", "best", or None where none was named."""

    checkpoint_dir: str
    which: int | str | None

    def open(self) -> Run:
        """Open the run; raise CheckpointNotFoundError where there is none."""
        from ckpt_tasks.reading.reading import open_run

        return open_run(self.checkpoint_dir)

    def find(self) -> tuple[Run, Checkpoint]:
        """Open the run and find the checkpoint; without one named, the latest."""
        run = self.open()
        return run, run.find("latest" if self.which is None else self.which)


def parse_target(text: str) -> Target:
    """Take "DIR@STEP" apart at its last @; a directory of that whole name, if there is one, is meant as it stands.

    Raises ConfigError where what follows the @ is neither a step nor "latest" nor "best".
    """
    return Target(*split_target(text))
