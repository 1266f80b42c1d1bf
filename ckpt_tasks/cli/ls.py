"""`ckpt ls`: list the checkpoints of a run, or the runs of a directory, one row each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

from ckpt_tasks.cli.arguments import (
    JsonOption,
    argument,
    complete_run,
    lineage_facts,
    option,
    params_line,
)
from ckpt_tasks.cli.output import Column, Output, column, listing, output, row_facts, title, widest_listing
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError
from ckpt_tasks.run.report.kept import kept_because
from ckpt_tasks.run.report.words import age, check_words, count, fine_span, number, size, when

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.restore.reading import Run
    from ckpt_tasks.format.ledger import State
    from ckpt_tasks.format.records import Checkpoint, Owner
    from ckpt_tasks.run.ledger.history import Head
    from ckpt_tasks.run.overview import RunSummary

_METRICS_SHOWN = 3
_ROWS_SHOWN = 50
_EVALUATIONS_SHOWN = 2

RootArgument = Annotated[str, argument("DIR", "a run directory, or one that holds runs", complete_run)]
MetricsOption = Annotated[
    str | None, option("--metrics", "NAME,NAME", "the metrics to show; --json has all [default: as many as fit]")
]
SortOption = Annotated[
    str | None,
    option("--sort", "NAME", "sort runs by name, state, step, saved, checkpoints, size or a metric; -NAME reverses"),
]
AllOption = Annotated[bool, option("--all", None, f"show every checkpoint of a run, not only the newest {_ROWS_SHOWN}")]


def ls(
    directory: RootArgument,
    *,
    metrics: MetricsOption = None,
    sort: SortOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the checkpoints of a run, or the runs of a directory.

    Lists the newest 50 checkpoints, newest first; --all and --json list every one. Lists each run in one row: its
    state, the step and age of its newest checkpoint, the number and size of its live checkpoints, and its last metrics;
    suite/metric is a metric of an evaluation. Exits with 1 if a run is damaged.
    """
    from ckpt_tasks.checkpoint.restore.reading import open_run
    from ckpt_tasks.run.overview import summaries_below
    from ckpt_tasks.storage.locations import Location

    with output(as_json) as out:
        chosen = [name for name in (metrics or "").split(",") if name]
        try:
            run = open_run(directory)
        except CheckpointNotFoundError:
            store = Location(directory).open()
            runs = summaries_below(store)
            if not runs:
                raise
            if every:
                hint = "Every run of a directory is listed."
                raise ConfigError("--all is for the checkpoints of one run", hint=hint) from None
            _list_runs(out, store.url, runs, chosen, sort)
            return
        if sort is not None:
            raise ConfigError("--sort is for a directory of many runs", hint="The checkpoints of one are newest first.")
        _list_run(out, run, chosen, None if every else _ROWS_SHOWN)


# ── the checkpoints of a run ─────────────────────────────────────────────────────────────────────────────────────


class _Row:
    """A checkpoint with its evaluations and leases, and the reasons why it is kept."""

    def __init__(self, checkpoint: Checkpoint, state: State, kept: list[str]):
        self.checkpoint, self.kept = checkpoint, kept
        self.pinned = state.pins.get(checkpoint.manifest_digest)
        self.evaluations: dict[str, dict[str, float]] = {}
        self.leases: list[dict[str, Any]] = []

    @staticmethod
    def all_of(state: State) -> list[_Row]:
        from ckpt_tasks.format.ledger import lineage

        kept, now = kept_because(state), time.time()
        rows = {c.manifest_digest: _Row(c, state, kept[c.manifest_digest]) for c in lineage(state.live)}
        for one in state.evaluations:
            if row := rows.get(one.manifest_digest):
                row.evaluations[one.suite] = dict(one.metrics)
        for lease in state.leases:
            if lease.expires_at > now and (row := rows.get(lease.manifest_digest)):
                row.leases.append({"holder": lease.holder, "expires_at": lease.expires_at})
        return [*rows.values()]

    def metric(self, suite: str, name: str) -> float | None:
        return (self.evaluations.get(suite, {}) if suite else self.checkpoint.metrics).get(name)


_HEAD = (
    Column("step", "step", attrgetter("checkpoint.step"), numbers=True),
    Column("saved_at", "saved", attrgetter("checkpoint.saved_at"), age, whole=True),
)
_TAIL = (
    Column("size_bytes", "size", attrgetter("checkpoint.size_bytes"), size, numbers=True),
    Column("cost_s", "waited", attrgetter("checkpoint.cost_s"), fine_span, numbers=True),
    Column("metrics", None, lambda row: dict(row.checkpoint.metrics)),
    Column("evaluations", None, attrgetter("evaluations")),
    Column("kept_because", None, attrgetter("kept")),
    column(
        "kept because", lambda row: [*(["discarded branch"] if row.checkpoint.abandoned else []), *row.kept], "\n".join
    ),
    Column("abandoned", None, attrgetter("checkpoint.abandoned")),
    Column("interim", None, attrgetter("checkpoint.interim")),
    Column("why", None, attrgetter("checkpoint.why")),
    Column("pinned", None, attrgetter("pinned")),
    Column("leases", None, attrgetter("leases")),
    *(Column(name, None, attrgetter(f"checkpoint.{name}")) for name in ("attempt", "manifest", "manifest_digest")),
    Column("parent", None, attrgetter("checkpoint.parent")),
)


def _list_run(out: Output, run: Run, metrics: list[str], most: int | None) -> None:
    head = run.head()
    rows = _Row.all_of(head.state)
    columns = [_column(name, rows) for name in metrics]
    out.answer(partial(_facts, run, head, rows), _parts(run, head, rows, columns, most))
    out.fail(head.entry is None and bool(head.damaged))


def _facts(run: Run, head: Head, rows: list[_Row]) -> dict[str, Any]:
    state, names = head.state, ("epoch", "host", "pid", "flow_run_id", "taken_at", "released")
    return {
        "run_key": run.run_key,
        "checkpoint_dir": run.history.store.url,
        "owner": None if state.owner is None else {name: getattr(state.owner, name) for name in names},
        "best": {"metric": state.best_metric, "mode": state.best_mode},
        **lineage_facts(state),
        "checks": [asdict(check) for check in state.checks],
        "ledger": {"entries": head.next_n, "damaged": list(head.damaged)},
        "checkpoints": row_facts((*_HEAD, *_TAIL), rows),
    }


def _parts(run: Run, head: Head, rows: list[_Row], chosen: list[tuple[str, str]], most: int | None) -> Iterator[Any]:
    yield title(run)
    shown = rows[:most]
    columns = chosen or _metric_columns(shown)
    if rows:
        names = [f"{suite}/{name}" if suite else name for suite, name in columns]
        fewest = len(chosen)
        yield from widest_listing(lambda fit: _listing(shown, columns[:fit]), names, fewest, _METRICS_SHOWN)
    else:
        yield "\nThere is no checkpoint yet.\n"
    if len(shown) < len(rows):
        yield f"The newest {len(shown)} of {len(rows):,} checkpoints; --all shows every one.", "dim"
    if not all(row.kept or row.checkpoint.abandoned for row in shown):
        yield "Rows without a reason: within max_num_checkpoints, or not pruned yet.", "dim"
    yield from _reasons(shown, rows)
    yield _holder(head.state.owner), "dim"
    yield from ((check_words(check), "red" if check.fault else "dim") for check in head.state.checks)
    if (origin := head.state.origin) is not None:
        changed = f", with {params_line(origin.set)}" if origin.set else ""
        yield f"Forked from {origin.run_key} ({origin.url}) at step {origin.step}{changed}.", "dim"
    if any(row.checkpoint.abandoned for row in rows):
        yield "Discarded branch: training went back to an older checkpoint, and resumed from that.", "dim"
    if run.run_key is None:
        yield "format.json is damaged; the checkpoints hold the run's key as well.", "yellow"
    if head.damaged:
        entries = count(len(head.damaged), "ledger entry", "ledger entries")
        yield f"{entries} newer than the newest good one cannot be read:", "yellow"
        yield from ((f"  {name}", "yellow") for name in head.damaged)


def _reasons(shown: list[_Row], rows: list[_Row]) -> Iterator[Any]:
    """Say which checkpoints were saved though no save was due, and why, if the run has an interval."""
    every = math.gcd(*(row.checkpoint.step for row in rows if not _why(row.checkpoint)))  # The interval, if above 1.
    reasons = [
        f"{step} ({why})"
        for step, why in ((row.checkpoint.step, _why(row.checkpoint)) for row in shown)
        if why and (every < 2 or step % every or not step)
    ]
    if reasons and any(row.checkpoint.interim or not row.checkpoint.why for row in rows):
        yield f"Saved not by the interval: {', '.join(reasons)}.", "dim"


def _why(checkpoint: Checkpoint) -> str:
    """Return why a checkpoint was saved though no save was due; "" if one was."""
    if checkpoint.why == "call":
        return "first save" if checkpoint.parent is None else "save() or the end of training"
    if not checkpoint.interim:
        return ""
    return {"signal": "a signal", "batch": "end of a batch"}.get(checkpoint.why, "end of a batch or a process")


def _listing(rows: list[_Row], columns: list[tuple[str, str]]) -> Any:
    def metric(suite: str, name: str) -> Column:
        return column(f"{suite}\n{name}" if suite else name, lambda row: row.metric(suite, name), _number, numbers=True)

    metrics = (metric(*which) for which in columns)
    return listing((*_HEAD, *metrics, *_TAIL), rows, lambda row: "dim" if row.checkpoint.abandoned else "")


def _number(value: float | None) -> str:
    return "" if value is None else number(value)


def _metric_columns(rows: list[_Row]) -> list[tuple[str, str]]:
    """Return (suite, metric), the most important first: one metric of training, two of evaluations, then all others."""
    from ckpt_tasks.run.report.picture import sort_metrics

    own = [("", name) for name in sort_metrics({name for row in rows for name in row.checkpoint.metrics})]
    suites = dict.fromkeys(suite for row in rows for suite in row.evaluations)
    evaluated = [
        (suite, name)
        for suite in suites
        for name in sort_metrics({name for row in rows for name in row.evaluations.get(suite, {})})
    ]
    # Losses come first, then the other metrics.
    best = sorted(evaluated, key=lambda column: "loss" not in column[1])
    return [*own[:1], *best[:_EVALUATIONS_SHOWN], *own[1:], *best[_EVALUATIONS_SHOWN:]]


def _column(name: str, rows: list[_Row]) -> tuple[str, str]:
    """Return (suite, metric) for a name; raise ConfigError if no checkpoint has this metric."""
    known = {(f"{suite}/{one}" if suite else one): (suite, one) for suite, one in _metric_columns(rows)}
    if name not in known:
        raise ConfigError(f"no checkpoint has the metric {name!r:.80}", hint=f"There are {', '.join(known) or 'none'}.")
    return known[name]


def _holder(owner: Owner | None) -> str:
    from ckpt_tasks.run.ledger.ownership import identify, why_free

    if owner is None:
        return "No process has held this run."
    if owner.released:
        return "No process holds this run."
    free = why_free(owner, identify(None), None, float("inf"))
    if free:
        return f"No process holds this run: {free}."
    return f"Held by process {owner.pid} on {owner.host} since {when(owner.taken_at)}."


# ── the runs of a directory ──────────────────────────────────────────────────────────────────────────────────────

_BAD = ("damaged", "unreadable")
_RUN_STYLES = {
    "running": "green",
    "stopped": "yellow",
    "silent": "yellow",
    "damaged": "bold red",
    "unreadable": "bold red",
}
# Runs can be sorted by these columns, and by metrics. True: the largest value comes first.
_KEYS: Mapping[str, tuple[Callable[[RunSummary], Any], bool]] = {
    "name": (lambda run: run.name, False),
    "state": (lambda run: run.state, False),
    "step": (lambda run: run.step, True),
    "saved": (lambda run: run.saved_at, True),
    "checkpoints": (lambda run: run.checkpoints, True),
    "size": (lambda run: run.size_bytes, True),
}
_RUN_COLUMNS = (
    column("run", "name"),
    column(
        "state",
        lambda run: (f"{run.state}{f', {run.pinned} pinned' * bool(run.pinned)}", _RUN_STYLES.get(run.state, "")),
        tuple,
    ),
    column("step", lambda run: "" if run.step is None else run.step, numbers=True),
    column("not committed", lambda run: "" if run.live_step is None else f"to {run.live_step}", numbers=True),
    column("saved", lambda run: age(run.saved_at) if run.saved_at else "", whole=True),
    column("live", "checkpoints", numbers=True),
    column("size", lambda run: size(run.size_bytes) if run.checkpoints else "", numbers=True),
)


def _list_runs(out: Output, url: str, runs: list[RunSummary], metrics: Sequence[str], sort: str | None) -> None:
    ordered = sort_runs(runs, sort or "name")
    known = {name for run in runs for name in run.metrics}
    unknown = [name for name in metrics if name not in known]
    if unknown:
        raise ConfigError(f"no run here has the metric {unknown[0]!r:.80}", hint=_these(known))
    facts = {"directory": url, "runs": [asdict(run) for run in ordered]}
    out.answer(facts, _parts_of_runs(url, ordered, metrics, (sort or "").removeprefix("-")))
    out.fail(any(run.state in _BAD for run in runs))


def sort_runs(runs: Sequence[RunSummary], sort: str) -> list[RunSummary]:
    """Sort runs by a column or a metric, runs without a value last; "-" before the name reverses the order.

    Raises ConfigError for a name that is neither a column nor a metric of a run.
    """
    name = sort.removeprefix("-")
    known = {metric for run in runs for metric in run.metrics}
    if name in _KEYS:
        value, falling = _KEYS[name]
    elif name in known:
        value, falling = (lambda run: run.metrics.get(name, math.nan)), False
    else:
        raise ConfigError(
            f"{name!r:.80} is nothing to sort by", hint=f"{', '.join(_KEYS)}, or a metric. {_these(known)}"
        )
    falling ^= sort != name
    without = [run for run in runs if (one := value(run)) is None or (isinstance(one, float) and math.isnan(one))]
    ordered = sorted((run for run in runs if run not in without), key=value, reverse=falling)
    return [*ordered, *without]


def _these(known: set[str]) -> str:
    from ckpt_tasks.run.report.picture import sort_metrics

    return f"There are {', '.join(sort_metrics(known))}." if known else "None has any."


def _parts_of_runs(url: str, runs: Sequence[RunSummary], metrics: Sequence[str], sort: str) -> Iterator[Any]:
    from ckpt_tasks.run.report.picture import sort_metrics

    def metric(name: str) -> Column:
        return column(name, lambda run: run.metrics.get(name), _number, numbers=True)

    def table(shown: int) -> Any:
        return listing((*_RUN_COLUMNS, *map(metric, columns[:shown])), runs)

    known = sort_metrics({name for run in runs for name in run.metrics})
    sorted_by = [sort] if sort in known else []
    columns = list(metrics) or [*sorted_by, *(name for name in known if name != sort)]
    yield url, "bold"
    yield from widest_listing(table, columns, len(metrics) or len(sorted_by), _METRICS_SHOWN)
    yield from ((f"{run.name}: {run.why}", "red") for run in runs if run.state in _BAD)
    states = [f"{sum(run.state == state for run in runs)} {state}" for state in dict.fromkeys(r.state for r in runs)]
    room = size(sum(run.size_bytes for run in runs))
    yield f"{count(len(runs), 'run')}, {room}: {', '.join(states)}.", "dim"
