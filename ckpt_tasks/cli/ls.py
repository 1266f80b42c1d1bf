"""`ckpt ls`: list the checkpoints of a run, or the runs of a directory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ckpt_tasks.cli.completion import complete_run
from ckpt_tasks.cli.facts import kept_because, lineage_facts, params_line
from ckpt_tasks.cli.ls_runs import list_runs
from ckpt_tasks.cli.output import JsonOption, Output, output, table, widest_listing
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError
from ckpt_tasks.report.words import age, count, number, printable, size, span, when

if TYPE_CHECKING:
    from rich.table import Table

    from ckpt_tasks.format.ledger import State
    from ckpt_tasks.format.records import Checkpoint, Evaluation, Lease, Owner
    from ckpt_tasks.ledger.history import Head
    from ckpt_tasks.reading.reading import Run

__all__ = ["ls"]

_METRICS_SHOWN = 3
_EVALUATIONS_SHOWN = 2


RootArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR", help="a run directory, or one that holds runs", show_default=False, autocompletion=complete_run
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option("--metrics", metavar="NAME,NAME", help="the metrics to show [default: as many as fit]"),
]
SortOption = Annotated[
    str | None,
    typer.Option(
        "--sort",
        metavar="NAME",
        help="sort runs by name, state, step, saved, checkpoints, size or a metric; -NAME reverses",
    ),
]


def ls(
    directory: RootArgument, *, metrics: MetricsOption = None, sort: SortOption = None, as_json: JsonOption = False
) -> None:
    """List the checkpoints of a run, or the runs of a directory.

    Checkpoints are listed newest first. Each run has one row: its state, step and age of its newest checkpoint,
    number and size of its live checkpoints, and its last metrics; those of an evaluation are named suite/metric.
    Exits with 1 if a run is damaged.
    """
    from ckpt_tasks.reading.reading import open_run

    with output(as_json) as out:
        chosen = [name for name in (metrics or "").split(",") if name]
        try:
            run = open_run(directory)
        except CheckpointNotFoundError:
            if not _list_below(out, directory, chosen, sort):
                raise
            return
        if sort is not None:
            raise ConfigError("--sort is for a directory of many runs", hint="The checkpoints of one are newest first.")
        _list_run(out, run, chosen)


def _list_below(out: Output, directory: str, metrics: list[str], sort: str | None) -> bool:
    """List the runs below a directory that is not a run; return False if there are none."""
    from ckpt_tasks.reading.overview import summaries_below
    from ckpt_tasks.storage.locations import Location

    store = Location(directory).open()
    runs = summaries_below(store)
    if runs:
        list_runs(out, store.url, runs, metrics, sort)
    return bool(runs)


def _list_run(out: Output, run: Run, metrics: list[str]) -> None:
    from ckpt_tasks.format.ledger import lineage

    head = run.head()
    kept = kept_because(head.state)
    marks = _Marks.of(head.state)
    rows = [_row(checkpoint, marks, kept[checkpoint.manifest_digest]) for checkpoint in lineage(head.state.live)]
    owner = head.state.owner
    out.data(
        {
            "run_key": run.run_key,
            "checkpoint_dir": run.history.store.url,
            "owner": None if owner is None else _owner(owner),
            "best": {"metric": head.state.best_metric, "mode": head.state.best_mode},
            **lineage_facts(head.state),
            "ledger": {"entries": head.next_n, "damaged": list(head.damaged)},
            "checkpoints": rows,
        }
    )
    _print(out, run, head, rows, metrics)
    if head.entry is None and head.damaged:
        out.fail()


class _Marks(NamedTuple):
    """Evaluations, leases and pins of a state, by manifest digest."""

    evaluations: Mapping[str, list[Evaluation]]
    leases: Mapping[str, list[Lease]]
    pins: Mapping[str, str]

    @classmethod
    def of(cls, state: State) -> _Marks:
        evaluations, leases, now = defaultdict(list), defaultdict(list), time.time()
        for evaluation in state.evaluations:
            evaluations[evaluation.manifest_digest].append(evaluation)
        for lease in state.leases:
            if lease.expires_at > now:
                leases[lease.manifest_digest].append(lease)
        return cls(evaluations, leases, state.pins)


def _row(checkpoint: Checkpoint, marks: _Marks, kept: list[str]) -> dict[str, Any]:
    digest = checkpoint.manifest_digest
    return {
        "step": checkpoint.step,
        "saved_at": checkpoint.saved_at,
        "size_bytes": checkpoint.size_bytes,
        "cost_s": checkpoint.cost_s,
        "metrics": dict(checkpoint.metrics),
        "evaluations": {e.suite: dict(e.metrics) for e in marks.evaluations[digest]},
        "kept_because": kept,
        "abandoned": checkpoint.abandoned,
        "interim": checkpoint.interim,
        "pinned": marks.pins.get(digest),
        "leases": [{"holder": lease.holder, "expires_at": lease.expires_at} for lease in marks.leases[digest]],
        "attempt": checkpoint.attempt,
        "manifest": checkpoint.manifest,
        "manifest_digest": digest,
        "parent": checkpoint.parent,
    }


def _print(out: Output, run: Run, head: Head, rows: list[dict[str, Any]], metrics: list[str]) -> None:
    from rich.text import Text

    if out.as_json:
        return
    out.print(title(run))
    columns = [_column(name, rows) for name in metrics] or _metric_columns(rows)[:_METRICS_SHOWN]
    fewest = len(columns) if metrics else 0
    if rows:
        names = [f"{suite}/{name}" if suite else name for suite, name in columns]
        out.print(*widest_listing(lambda shown: _listing(rows, columns[:shown]), names, fewest))
    else:
        out.print(Text("\nThere is no checkpoint yet.\n"))
    out.print(Text(_holder(head.state.owner), style="dim"))
    origin = head.state.origin
    if origin is not None:
        changed = f", with {params_line(origin.set)}" if origin.set else ""
        forked = f"Forked from {origin.run_key} ({origin.url}) at step {origin.step}{changed}."
        out.print(Text(printable(forked), style="dim"))
    if any(row["abandoned"] for row in rows):
        out.print(Text("Left behind: training went back to an older checkpoint, and on from there.", style="dim"))
    if run.run_key is None:
        out.print(Text("format.json is damaged; the checkpoints hold the run's key as well.", style="yellow"))
    if head.damaged:
        entries = count(len(head.damaged), "ledger entry", "ledger entries")
        out.print(Text(f"{entries} newer than the newest good one cannot be read:", style="yellow"))
        out.print(*(Text(f"  {name}", style="yellow") for name in head.damaged))


def _listing(rows: list[dict[str, Any]], columns: list[tuple[str, str]]) -> Table:
    metrics = [printable(name) if not suite else f"{suite}\n{printable(name)}" for suite, name in columns]
    numbers = ("step", *metrics, "size", "cost")
    listing = table(
        "step", "saved", *metrics, "size", "cost", "kept because", right=numbers, unwrapped_columns=("saved",)
    )
    for row in rows:
        values = (_metric(row, *column) for column in columns)
        why = "\n".join(
            printable(reason) for reason in (*(["left behind"] if row["abandoned"] else []), *row["kept_because"])
        )
        cells = (str(row["step"]), age(row["saved_at"]), *values, size(row["size_bytes"]), span(row["cost_s"]), why)
        listing.add_row(*cells, style="dim" if row["abandoned"] else "")
    return listing


def title(run: Run, which: str = "") -> Any:
    """Return the title line: run key and URL."""
    from rich.text import Text

    name = printable(run.run_key or "run of unknown key")
    return Text.assemble((f"{name}{which}", "bold"), "  ", (printable(run.history.store.url), "dim"))


def _metric_columns(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (suite, metric) in order of worth: training's first, two of evaluations, the rest of training's."""
    from ckpt_tasks.report.picture import sort_metrics

    own = [("", name) for name in sort_metrics({name for row in rows for name in row["metrics"]})]
    suites = dict.fromkeys(suite for row in rows for suite in row["evaluations"])
    evaluated = [
        (suite, name)
        for suite in suites
        for name in sort_metrics({name for row in rows for name in row["evaluations"].get(suite, {})})
    ]
    best = sorted(evaluated, key=lambda column: "loss" not in column[1])  # a loss of each suite before all else
    return [*own[:1], *best[:_EVALUATIONS_SHOWN], *own[1:], *best[_EVALUATIONS_SHOWN:]]


def _column(name: str, rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Return (suite, metric) for a name; raise ConfigError if no checkpoint has it."""
    known = {(f"{suite}/{one}" if suite else one): (suite, one) for suite, one in _metric_columns(rows)}
    if name not in known:
        raise ConfigError(f"no checkpoint has the metric {name!r:.80}", hint=f"There are {', '.join(known) or 'none'}.")
    return known[name]


def _metric(row: dict[str, Any], suite: str, name: str) -> str:
    value = (row["evaluations"].get(suite, {}) if suite else row["metrics"]).get(name)
    return "" if value is None else number(value)


def _owner(owner: Owner) -> dict[str, Any]:
    names = ("epoch", "host", "pid", "flow_run_id", "taken_at", "released")
    return {name: getattr(owner, name) for name in names}


def _holder(owner: Owner | None) -> str:
    from ckpt_tasks.ledger.ownership import identify, why_free

    if owner is None:
        return "No process has held this run."
    if owner.released:
        return "No process holds this run."
    free = why_free(owner, identify(None), None, float("inf"))
    if free:
        return f"No process holds this run: {free}."
    return printable(f"Held by process {owner.pid} on {owner.host} since {when(owner.taken_at)}.")
