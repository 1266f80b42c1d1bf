"""`ckpt ls ROOT`: many runs side by side, one row each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckpt_tasks.cli.output import Output, table, widest_listing
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.report.words import age, count, number, printable, size

if TYPE_CHECKING:
    from rich.table import Table

    from ckpt_tasks.reading.overview import RunSummary

__all__ = ["list_runs", "sort_runs"]

_METRICS_SHOWN = 3
_BAD = ("damaged", "unreadable")
_STYLES = {"running": "green", "silent": "yellow", "damaged": "bold red", "unreadable": "bold red"}
# Columns to sort by, beside metrics; True: the largest comes first.
_KEYS: Mapping[str, tuple[Callable[[RunSummary], Any], bool]] = {
    "name": (lambda run: run.name, False),
    "state": (lambda run: run.state, False),
    "step": (lambda run: run.step, True),
    "saved": (lambda run: run.saved_at, True),
    "checkpoints": (lambda run: run.checkpoints, True),
    "size": (lambda run: run.size_bytes, True),
}


def list_runs(out: Output, url: str, runs: list[RunSummary], metrics: Sequence[str], sort: str | None) -> None:
    """Print the runs below a directory; the verb fails if one is damaged."""
    ordered = sort_runs(runs, sort or "name")
    known = {name for run in runs for name in run.metrics}
    unknown = [name for name in metrics if name not in known]
    if unknown:
        raise ConfigError(f"no run here has the metric {unknown[0]!r:.80}", hint=_these(known))
    out.data({"directory": url, "runs": [asdict(run) for run in ordered]})
    if not out.as_json:
        _print(out, url, ordered, metrics, (sort or "").removeprefix("-"))
    if any(run.state in _BAD for run in runs):
        out.fail()


def sort_runs(runs: Sequence[RunSummary], sort: str) -> list[RunSummary]:
    """Sort runs by a column or a metric, runs without a value last; "-" before the name reverses the order.

    Raises ConfigError for a name that no run has.
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
    without = [run for run in runs if (known_value := value(run)) is None or _is_nan(known_value)]
    ordered = sorted((run for run in runs if run not in without), key=value, reverse=falling)
    return [*ordered, *without]


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _these(known: set[str]) -> str:
    from ckpt_tasks.report.picture import sort_metrics

    return f"There are {', '.join(sort_metrics(known))}." if known else "None has any."


def _print(out: Output, url: str, runs: Sequence[RunSummary], metrics: Sequence[str], sort: str) -> None:
    from rich.text import Text

    from ckpt_tasks.report.picture import sort_metrics

    out.print(Text(printable(url), style="bold"))
    known = sort_metrics({name for run in runs for name in run.metrics})
    sorted_by = [sort] if sort in known else []
    columns = list(metrics) or [*sorted_by, *(name for name in known if name != sort)][:_METRICS_SHOWN]
    fewest = len(metrics) or len(sorted_by)
    out.print(*widest_listing(lambda shown: _listing(runs, columns[:shown]), columns, fewest))
    for run in runs:
        if run.state in _BAD:
            out.print(Text(f"{printable(run.name)}: {printable(run.why)}", style="red"))
    states = [f"{sum(run.state == state for run in runs)} {state}" for state in dict.fromkeys(r.state for r in runs)]
    room = size(sum(run.size_bytes for run in runs))
    out.print(Text(f"{count(len(runs), 'run')}, {room}: {', '.join(states)}.", style="dim"))


def _listing(runs: Sequence[RunSummary], metrics: Sequence[str]) -> Table:
    from rich.text import Text

    names = [printable(name) for name in metrics]
    numbers = ("step", "live", "size", *names)
    made = table("run", "state", "step", "saved", "live", "size", *names, right=numbers, unwrapped_columns=("saved",))
    for run in runs:
        pinned = f", {run.pinned} pinned" if run.pinned else ""
        shown = ("" if (value := run.metrics.get(name)) is None else number(value) for name in metrics)
        made.add_row(
            printable(run.name),
            Text(run.state + pinned, style=_STYLES.get(run.state, "")),
            "" if run.step is None else str(run.step),
            age(run.saved_at) if run.saved_at else "",
            str(run.checkpoints),
            size(run.size_bytes) if run.checkpoints else "",
            *shown,
        )
    return made
