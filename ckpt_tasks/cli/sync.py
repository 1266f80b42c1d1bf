"""`ckpt sync`: copy a run, or one checkpoint of it, to another store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.facts import RunOrCheckpointArgument, parse_target
from ckpt_tasks.cli.ls import title
from ckpt_tasks.cli.output import JsonOption, Output, output, reading, table
from ckpt_tasks.errors import OwnedError
from ckpt_tasks.report.words import age, count, printable, size, span

if TYPE_CHECKING:
    from ckpt_tasks.copying.syncing import SyncReport
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.reading.reading import Run
    from ckpt_tasks.storage.port import Store

__all__ = ["SingleOption", "print_unleased", "sync"]

ToArgument = Annotated[
    str,
    typer.Argument(metavar="TO", help="the target run directory: a new one, or a copy of this run", show_default=False),
]
SingleOption = Annotated[
    bool,
    typer.Option("--single-writer", help="TO has no put-if-absent; you make sure that no other process writes there"),
]


def sync(
    checkpoint: RunOrCheckpointArgument,
    to: ToArgument,
    *,
    single_writer: SingleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy a run, or one checkpoint, to another store.

    Without @STEP it copies all live checkpoints, with evaluations and pins. Every byte is verified on the way. Objects
    that TO has are not copied again: repeat the command after an interruption, or to copy what is new. Removes nothing
    from TO, and does not bring back what was pruned there. Exits with 1 if anything could not be copied.
    """
    with output(as_json) as out:
        parsed = parse_target(checkpoint)
        run = parsed.open()
        only = None if parsed.which is None else run.find(parsed.which)
        _sync(out, run, only, to, single_writer=single_writer)


def _sync(out: Output, run: Run, only: Checkpoint | None, to: str, *, single_writer: bool) -> None:
    from ckpt_tasks.storage.locations import Location

    place = Location(to).resolve()
    target, single_writer = place.open(), single_writer or place.single_writer
    began = time.monotonic()
    report = _copy(out, run, only, target, single_writer=single_writer)
    took_s = time.monotonic() - began
    good = not report.faults and (only is None or report.rows[0].outcome in ("copied", "there already"))
    out.data(_facts(run, target, report, took_s, good=good))
    if not out.as_json:
        _print(out, run, target, report, took_s)
        print_unleased(out, run)
    if not good:
        out.fail()


def _copy(out: Output, run: Run, only: Checkpoint | None, target: Store, *, single_writer: bool) -> SyncReport:
    from ckpt_tasks.copying.syncing import plan_sync, run_sync

    plan = plan_sync(run, target, only)
    with reading(out, "copying", plan.size_bytes) as on_progress:
        try:
            return run_sync(run, target, plan, single_writer=single_writer, on_progress=on_progress)
        except OwnedError as error:
            error.hint = "Nothing is copied to a run that is training: stop it there, or copy to another directory."
            raise


def _facts(run: Run, target: Store, report: SyncReport, took_s: float, *, good: bool) -> dict[str, Any]:
    return {
        "run_key": run.run_key,
        "from": run.history.store.url,
        "to": target.url,
        "good": good,
        "checkpoints": [
            {
                "step": row.checkpoint.step,
                "manifest_digest": row.checkpoint.manifest_digest,
                "outcome": row.outcome,
                "copied_bytes": row.copied_bytes,
                "found_bytes": row.found_bytes,
                "fault": row.fault,
            }
            for row in report.rows
        ],
        "evaluations": report.evaluations,
        "pins": report.pins,
        "faults": list(report.faults),
        "took_s": round(took_s, 3),
        "leased": not run.read_only,
    }


def _print(out: Output, run: Run, target: Store, report: SyncReport, took_s: float) -> None:
    from rich.text import Text

    out.print(Text.assemble(title(run), ("  →  ", "dim"), (printable(target.url), "dim")))
    if report.rows:
        out.print(_listing(report))
    copied = [row for row in report.rows if row.outcome == "copied"]
    more = [
        *([count(report.evaluations, "evaluation")] if report.evaluations else []),
        *([count(report.pins, "pin")] if report.pins else []),
    ]
    out.print(*(Text(printable(fault), style="red") for fault in report.faults))
    if copied or more:
        moved = size(sum(row.copied_bytes for row in copied))
        summary = ", ".join([f"{count(len(copied), 'checkpoint')} of {len(report.rows)}", *more, moved])
        out.print(Text.assemble(("Copied", "bold green"), f": {summary} in {span(took_s)}, every byte verified."))
    elif not report.faults:
        out.print("There is nothing to copy.")
    if report.faults:
        out.print(Text.assemble(("Not everything", "bold red"), " could be copied. See what is damaged: ckpt verify"))


def print_unleased(out: Output, source: Run) -> None:
    """Print a warning if the source was read without a lease."""
    from rich.text import Text

    if source.read_only:
        words = "The source cannot be written: it was read without a lease, so its owner could prune what was read."
        out.print(Text(words, style="yellow"))


def _listing(report: SyncReport) -> Any:
    made = table("step", "saved", "size", "copied", "result", right=("step", "size", "copied"))
    styles = {"copied": "", "damaged": "red", "refused": "red"}
    for row in reversed(report.rows):
        checkpoint = row.checkpoint
        reused = f", {size(row.found_bytes)} lay there" if row.found_bytes else ""
        copied = size(row.copied_bytes) if row.copied_bytes else ""
        cells = (
            str(checkpoint.step),
            age(checkpoint.saved_at),
            size(checkpoint.size_bytes),
            copied,
            f"{row.outcome}{reused}",
        )
        made.add_row(*cells, style=styles.get(row.outcome, "dim"))
    return made
