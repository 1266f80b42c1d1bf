"""`ckpt report`: where a run's time went, as a table and as one self-contained HTML file."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.facts import RunArgument, kept_because
from ckpt_tasks.cli.ls import title
from ckpt_tasks.cli.output import JsonOption, Output, output, table, write_file
from ckpt_tasks.report.words import printable

if TYPE_CHECKING:
    from ckpt_tasks.reading.reading import Run
    from ckpt_tasks.report.report import Report

__all__ = ["report"]

_BAR = 36  # characters for all the time

OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="the HTML file [default: RUN_KEY-report.html]", show_default=False),
]


def report(directory: RunArgument, *, out: OutOption = None, as_json: JsonOption = False) -> None:
    """Write the report of a run.

    One HTML file: the run on a time line (loss, evaluations, commits, failures, resumes), and its goodput: the share of
    its time that went into the training its result is made of, and where the rest went. It replaces an older report,
    but no other file.
    """
    from ckpt_tasks.ledger.steps import read_curve
    from ckpt_tasks.ledger.timeline import read_timeline
    from ckpt_tasks.reading.reading import open_run
    from ckpt_tasks.report.report import make_report, to_html

    with output(as_json) as shown:
        run = open_run(directory)
        state = run.head().state
        kept = {digest: ", ".join(reasons) for digest, reasons in kept_because(state).items()}
        made = make_report(
            run.run_key,
            run.history.store.url,
            read_timeline(run.history),
            state,
            kept,
            read_curve=partial(read_curve, run.history),
        )
        place = out or Path(f"{re.sub(r'[^A-Za-z0-9._-]+', '-', made.run_key).strip('.-') or 'run'}-report.html")
        write_file(place, to_html(made), what="report", option="--out", is_ours=_is_report)
        shown.data({**made.data(), "html": str(place)})
        if not as_json:
            _print(shown, run, made, place)


def _is_report(head: bytes) -> bool:
    from ckpt_tasks.report.report import GENERATOR

    return not head or GENERATOR.encode() in head


def _print(shown: Output, run: Run, made: Report, place: Path) -> None:
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 3))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, value in made.facts():
        if value != run.history.store.url:  # the title says it
            facts.add_row(name, printable(value))
    shown.print(title(run), Text(made.summary, style="bold"), "", facts)
    if made.shares:
        shown.print(_shares(made))
    for caveat in made.caveats():
        shown.print(Text(caveat, style="yellow"))
    shown.print(Text.assemble("Report: ", (printable(str(place)), "bold")))


def _shares(made: Report) -> Any:
    from ckpt_tasks.report.report import SHARES_MEAN
    from ckpt_tasks.report.words import fine_span, percent

    listing = table("", "time", "part", "", "means", right=("time", "part"), unwrapped_columns=("",))
    for name, seconds, part in made.shares:
        cells = (name, fine_span(seconds), percent(part), "█" * round(_BAR * part), SHARES_MEAN[name])
        listing.add_row(*cells, style="bold" if name == "useful" else "")
    return listing
