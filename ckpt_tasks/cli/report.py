"""`ckpt report` and `metrics`: where a run's time went, how often it should save, and its metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.arguments import JsonOption, RunArgument, argument, complete_run, option
from ckpt_tasks.cli.output import column, console, grid, listing, output, rendered, title, write_file
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.policy.cadence import (
    OVERHEAD_CAP,
    Observed,
    Recommendation,
    TradeOff,
    recommend,
    trade_off,
    trade_off_at,
)
from ckpt_tasks.run.report.kept import kept_because
from ckpt_tasks.run.report.words import count, fine_span, percent

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.restore.reading import Run
    from ckpt_tasks.run.report.run_report import Report

_RETURNS = 4  # As many columns as fit on a narrow screen.
# The width of the bar in characters.
_BARS, _BESIDE = (12, 36), 80  # Characters: the shortest and the longest bar, and the columns beside it.

OutOption = Annotated[
    Path | None, option("--out", "FILE", "the HTML file [default: RUN_KEY-report.html]", show_default=False)
]
RootArgument = Annotated[str, argument("DIR", "a run directory, or one that holds runs", complete_run)]
TextOption = Annotated[Path | None, option("--out", "FILE", "write this file, whole or not at all", show_default=False)]
PortOption = Annotated[int | None, option("--port", "N", "serve them to this host at this port", show_default=False)]
OtlpOption = Annotated[bool, option("--otlp", None, "send them once to an OpenTelemetry collector, over HTTP")]


def report(directory: RunArgument, *, out: OutOption = None, as_json: JsonOption = False) -> None:
    """Print where a run's time went, and write its HTML report.

    The HTML file shows the run on a time line (loss, evaluations, commits, failures, resumes), and its goodput: the
    share of its time that went into training that is part of the result, and where the rest went. Replaces an older
    report, but no other file.

    Also prints how often the run should save: at the interval at which waiting for saves and repeating lost work
    together cost least, by the costs of its newest saves and its failures so far; and what other intervals would cost.
    """
    from ckpt_tasks.checkpoint.restore.reading import open_run
    from ckpt_tasks.run.ledger.curve import read_curve
    from ckpt_tasks.run.ledger.timeline import read_timeline
    from ckpt_tasks.run.overview import life_of
    from ckpt_tasks.run.report.html import to_html
    from ckpt_tasks.run.report.run_report import make_report

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
            life=" ".join(life_of(run.history, state)).strip(),
            read_curve=partial(read_curve, run.history),
        )
        place = out or Path(f"{re.sub(r'[^A-Za-z0-9._-]+', '-', made.run_key).strip('.-') or 'run'}-report.html")
        write_file(place, to_html(made), what="report", option="--out", is_ours=_is_report)
        planned = _planned(run)
        facts = {**made.data(), "cadence": None if planned is None else planned.data(), "html": str(place)}
        shown.answer(facts, _report_parts(run, made, planned, place))


def _is_report(head: bytes) -> bool:
    from ckpt_tasks.run.report.html import GENERATOR

    return not head or GENERATOR.encode() in head


def _report_parts(run: Run, made: Report, planned: _Planned | None, place: Path) -> Iterator[Any]:
    from ckpt_tasks.run.report.run_report import SHARES_MEAN

    yield title(run)
    yield made.summary, "bold"
    yield ""
    # Omit the URL: the title has it.
    yield grid(line for line in made.facts() if line[1] != run.history.store.url)
    if made.shares:
        bar = max(_BARS[0], min(_BARS[1], console().width - _BESIDE))
        columns = (
            column("", itemgetter(0), whole=True),
            column("time", itemgetter(1), fine_span, numbers=True),
            column("part", itemgetter(2), percent, numbers=True),
            column("", lambda share: "█" * round(bar * share[2]), whole=True),
            column("means", lambda share: SHARES_MEAN[share[0]]),
        )
        yield listing(columns, made.shares, lambda share: "bold" if share[0] == "useful" else "")
    heads, returns = made.returns()
    if returns:
        yield ("From each restart to the first step:", "bold")
        shown, first = returns[:_RETURNS], column(heads[0], itemgetter(0))
        resumes = (column(row[0], itemgetter(n), numbers=True) for n, row in enumerate(shown, 1))
        yield listing([first, *resumes], [*zip(heads[1:], *(row[1:] for row in shown), strict=True)])
    if planned is not None:
        yield ("How often to save:", "bold")
        yield grid(_lines(planned))
        yield _curve(planned)
    yield from ((caveat, "yellow") for caveat in made.caveats())
    yield ["Report: ", (str(place), "bold")]


# ── how often to save ────────────────────────────────────────────────────────────────────────────────────────────

# The bar of the largest sum has this many characters.
_CURVE_BAR = 28
_REACH, _ROWS = 8.0, 13


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """What saves and failures have cost so far, and the interval that follows."""

    observed: Observed
    recommended: Recommendation

    @property
    def at(self) -> TradeOff:
        """The expected costs of the recommended interval."""
        return trade_off_at(self.recommended.interval_s, self.observed, self.recommended.mtbf_s)

    def data(self) -> dict[str, Any]:
        return {
            "observed": asdict(self.observed),
            "recommended": {**asdict(self.recommended), **asdict(self.at)},
            "curve": [asdict(point) for point in trade_off(self.observed, self.recommended)],
        }


def _planned(run: Run) -> _Planned | None:
    """Return how often a run should save; None before its first checkpoint."""
    from ckpt_tasks.run.ledger.observing import observe

    observed = observe(run.history)
    return None if observed is None else _Planned(observed=observed, recommended=recommend(observed))


def _lines(planned: _Planned) -> list[tuple[str, str, str]]:
    observed, recommended, at = planned.observed, planned.recommended, planned.at
    step = f"a step takes {fine_span(observed.step_s)}, " if observed.step_s else ""
    every = f"{recommended.interval_s:,.{1 if recommended.interval_s < 99.95 else 0}f} s"
    every += f" ({fine_span(recommended.interval_s)})" if recommended.interval_s >= 120 else ""
    every += f", {count(recommended.steps, 'step')}" if recommended.steps else ""
    stall = f"training waits {fine_span(observed.stall_s)} at a save, which takes {fine_span(observed.flush_s)}"
    prior = "one a day is assumed, with the weight of a tenth of a failure"
    seen = f"{count(observed.failures, 'failure')}; before it, {prior}" if observed.failures else f"no failure; {prior}"
    costs = f"{percent(at.overhead)} waiting for saves, {percent(at.expected_loss)} doing lost work again"
    return [
        ("measured", f"{step}{stall}", ""),
        (
            "failures",
            f"{observed.failures} in {fine_span(observed.trained_s)} of training, by the newest entries of the ledger",
            "",
        ),
        ("between failures", f"{fine_span(recommended.mtbf_s)} ({seen})", ""),
        ("save every", every, "bold"),
        ("because", _why(planned), ""),
        ("costs", costs, ""),
    ]


def _why(planned: _Planned) -> str:
    observed, recommended = planned.observed, planned.recommended
    if recommended.decided_by == "optimum":
        return "no other costs less (Young/Daly)"
    if recommended.decided_by == "flush":
        return f"a flush takes that long; the optimum would be {fine_span(recommended.optimum_s)}"
    least = trade_off_at(max(recommended.optimum_s, observed.flush_s), observed, recommended.mtbf_s)
    without = f"without it every {fine_span(least.interval_s)}, at {percent(least.total)} in all"
    return f"of the overhead cap of {100 * OVERHEAD_CAP:g} %; {without}"


_CURVE = (
    column("save every", "interval_s", fine_span, numbers=True),
    column("waiting", "overhead", percent, numbers=True),
    column("repeating", "expected_loss", percent, numbers=True),
    column("together", "total", percent, numbers=True),
)


def _curve(planned: _Planned) -> Any:
    at = planned.at
    others = trade_off(planned.observed, planned.recommended, points=_ROWS, reach=_REACH)
    apart = [point for point in others if not at.interval_s / 1.05 < point.interval_s < at.interval_s * 1.05]
    points = sorted([*apart, at], key=attrgetter("interval_s"))
    per_cell = max(point.total for point in points) / _CURVE_BAR or 1.0

    def bar(point: TradeOff) -> Any:
        waiting, both = round(point.overhead / per_cell), round(point.total / per_cell)
        mark = " ◂ recommended" if point is at else ""
        return rendered([("█" * waiting, "yellow"), ("▒" * (both - waiting), "red"), mark])

    def style(point: TradeOff) -> str:
        return "bold" if point is at else "dim" if point.interval_s < planned.recommended.least_s else ""

    return listing((*_CURVE, column("", lambda point: point, bar)), points, style)


# ── metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────


def metrics(
    directory: RootArgument,
    *,
    out: TextOption = None,
    port: PortOption = None,
    otlp: OtlpOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print metrics of the runs in DIR, or send them by OTLP.

    DIR is a run, or holds runs. With --out, writes a file for node-exporter's textfile collector; with --port, serves
    the metrics at /metrics until Ctrl-C; with --otlp, sends them once to the collector that OTEL_EXPORTER_OTLP_ENDPOINT
    names. Reads only the ledgers, and asks no training process. deployments/alerts.yaml has an alert for each metric on
    which somebody must act.
    """
    from wsgiref.simple_server import WSGIRequestHandler, make_server

    from prometheus_client import generate_latest, make_wsgi_app
    from prometheus_client.exposition import ThreadingWSGIServer
    from prometheus_client.parser import text_string_to_metric_families as families

    from ckpt_tasks.cli.serving.access import Access, guarded
    from ckpt_tasks.run.report.prometheus import registry_of
    from ckpt_tasks.storage.locations import Location

    class Quiet(WSGIRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Print no line for a request."""

    with output(as_json) as shown:
        if port is not None and (otlp or out is not None):
            raise ConfigError("--port serves until Ctrl-C, and nothing comes after", hint="Leave --out and --otlp out.")
        registry = registry_of(Location(directory).open())
        if port is not None:
            try:
                app = guarded(make_wsgi_app(registry), Access("127.0.0.1", port))
                server = make_server("127.0.0.1", port, app, ThreadingWSGIServer, Quiet)
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"127.0.0.1:{port} cannot be listened at: {error}", hint="Give --port one that is free."
                ) from error
            shown.print(f"Serving http://127.0.0.1:{port}/metrics until Ctrl-C.")
            server.serve_forever()
        if otlp:
            from ckpt_tasks.run.report.otel import push_metrics

            push_metrics(registry)
        text = generate_latest(registry).decode()
        samples = [sample for one in families(text) for sample in one.samples]
        facts = [{"name": one.name, "labels": one.labels, "value": one.value} for one in samples]
        if out is not None:
            write_file(out, text, what="file of metrics", option="--out", is_ours=_is_metrics)
            shown.answer({"file": str(out), "metrics": facts}, [f"{out}: {count(len(facts), 'sample')}"])
        else:
            shown.answer({"metrics": facts}, [f"{count(len(facts), 'sample')} sent"] if otlp else [])
            if not (as_json or otlp):  # Lines of this format must not wrap.
                typer.echo(text, nl=False)


def _is_metrics(head: bytes) -> bool:
    return not head or head.startswith(b"# HELP ckpt_")
