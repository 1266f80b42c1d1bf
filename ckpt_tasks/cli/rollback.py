"""`ckpt rollback`: continue training from an older checkpoint, and skip the batches that spoilt it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tasks.cli.completion import complete_checkpoint
from ckpt_tasks.cli.facts import parse_target
from ckpt_tasks.cli.output import JsonOption, output
from ckpt_tasks.errors import ConfigError, OwnedError
from ckpt_tasks.ledger.targets import split_target
from ckpt_tasks.report.words import count, printable

if TYPE_CHECKING:
    from ckpt_tasks.reading.reading import Run

__all__ = ["rollback"]

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR@STEP", help="the checkpoint to go back to", show_default=False, autocompletion=complete_checkpoint
    ),
]
SkipOption = Annotated[
    str | None,
    typer.Option(
        "--skip-batches",
        metavar="401-410|N",
        help="batches to skip after that: the steps that would take them, or the next N",
        show_default=False,
    ),
]
ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="why; recorded in the ledger and shown in the report")
]


def rollback(
    target: TargetArgument,
    *,
    skip_batches: SkipOption = None,
    reason: ReasonOption = "by hand",
    as_json: JsonOption = False,
) -> None:
    """Go back to an older checkpoint.

    The next restore takes DIR@STEP. Checkpoints after it are marked as abandoned, not deleted. Every byte of DIR@STEP
    is read back first. Uncommitted snapshots in memory are not used. Takes ownership of the run for a moment: a run
    that is training is refused.
    """
    from ckpt_tasks.checkpoint.checkpointer import Checkpointer
    from ckpt_tasks.checkpoint.rollback import parse_skip
    from ckpt_tasks.ledger.config import CheckpointConfig

    with output(as_json) as out:
        parsed = parse_target(target)
        if parsed.which is None:
            raise ConfigError(f"{target!r:.200} names no step", hint="Write DIR@STEP, as ckpt ls lists them.")
        run = parsed.open()
        checkpoint = run.find(parsed.which)
        skip = parse_skip(skip_batches, checkpoint.step)
        with Checkpointer(CheckpointConfig(checkpoint_dir=split_target(target)[0], memory_dir=None)) as ckpt:
            try:
                ckpt.acquire()
            except OwnedError as error:
                error.hint = "Stop the training first: a rollback would fence it."
                raise
            ckpt.rollback(checkpoint.step, skip_batches=skip, reason=reason)
        left = _left_behind(run)
        out.data({"checkpoint_dir": run.history.store.url, "step": checkpoint.step, "skip": skip, "left_behind": left})
        out.print(f"Training goes on from step {checkpoint.step}; {count(len(left), 'checkpoint')} left behind.")
        if skip:
            out.print(f"Then it leaves out the batches of steps {skip[0]} to {skip[1]}.")
        out.print(f"Reason: {printable(reason)}")


def _left_behind(run: Run) -> list[int]:
    return sorted(checkpoint.step for checkpoint in run.checkpoints() if checkpoint.abandoned)
