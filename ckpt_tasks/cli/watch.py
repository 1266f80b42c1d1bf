"""`ckpt watch` and `ckpt serve`: follow a run in a terminal while it trains, and all runs on a web page."""

from __future__ import annotations

import json
import os
import secrets
import time
import webbrowser
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from ckpt_tasks.cli.arguments import JsonOption, RunArgument, argument, complete_run, option
from ckpt_tasks.cli.output import console, output, rendered, title, writing
from ckpt_tasks.errors import ConfigError, IntegrityError, ObjectNotFoundError, StoreError
from ckpt_tasks.format.parsing import finite_json
from ckpt_tasks.run.report.words import age, fine_span, number, printable, size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ckpt_tasks.checkpoint.restore.reading import Run
    from ckpt_tasks.format.ledger import Entry
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.run.ledger.history import Head
    from ckpt_tasks.run.ledger.live_steps import LiveStep
    from ckpt_tasks.run.ledger.timeline import Moment

_FIRST = 256  # Read this many ledger entries for the first curve.
_POINTS = 512
_EVENTS_SHOWN = 5
_BARS = "▁▂▃▄▅▆▇█"
_QUIET = ("lease", "live")  # There are many leases, which say nothing about training; the panel shows live steps.

LinesOption = Annotated[bool, option("--json", None, "print one JSON object per event and line")]
_MOST_S = 86_400
EveryOption = Annotated[float, option("--every", "SECONDS", "how often to look; ten times a second at most")]


def watch(directory: RunArgument, *, every: EveryOption = 1.0, as_json: LinesOption = False) -> None:
    """Follow a run: its step, rate, commits, owner and loss.

    Ctrl-C ends the watch. Only reads: the training does not notice. Without a terminal, prints one line per event.
    """
    from ckpt_tasks.checkpoint.restore.reading import open_run

    with output(as_json) as out, suppress(KeyboardInterrupt):
        if not 0 < every <= _MOST_S:  # This also refuses NaN.
            raise ConfigError(f"--every {every} is no number of seconds above 0 and up to {_MOST_S}")
        run = open_run(directory)
        course, screen = _Course(run), console()
        if screen.is_terminal and not as_json:
            _show(course, screen, max(every, 0.1))
        for event in [course.first(), *course.new()]:
            _say(event, as_json=out.as_json)
        while True:
            for event in course.new():
                _say(event, as_json=out.as_json)
            time.sleep(max(every, 0.1))


def _show(course: _Course, screen: Console, every_s: float) -> None:
    from rich.live import Live

    course.new()
    with Live(course.panel(screen.width), console=screen, auto_refresh=False, transient=False) as live:
        while True:
            course.new()
            live.update(course.panel(screen.width), refresh=True)
            time.sleep(every_s)


def _say(event: dict[str, Any], *, as_json: bool) -> None:
    with writing():
        if as_json:
            typer.echo(json.dumps(finite_json(event)))
        elif event["event"] not in _QUIET:
            typer.echo(_line(event))


class _Course:
    """The known facts of a run; `new` reads the ledger again and returns the events since the last call."""

    def __init__(self, run: Run):
        from ckpt_tasks.run.ledger.config import CheckpointConfig
        from ckpt_tasks.run.ledger.ownership import Signs
        from ckpt_tasks.run.ledger.timeline import read_timeline

        self._run = run
        self._timeout_s = CheckpointConfig.owner_timeout_s  # The ledger does not have a run's own timeout.
        self._signs = Signs(run.history, self._timeout_s)
        known = read_timeline(run.history, _FIRST)
        self._commits: deque[Moment] = deque((m for m in known.moments if m.kind == "commit"), _POINTS)
        self._shown: deque[dict[str, Any]] = deque(map(_event, known.moments[-_EVENTS_SHOWN:]), _EVENTS_SHOWN)
        self._head: Head = run.head()
        self._next_n = self._head.next_n
        self._free: str | None = None
        self._store_error: str | None = None
        self._owner_known = False
        self._live: list[LiveStep] = []

    def first(self) -> dict[str, Any]:
        """Return the first event of a watch: the run, its newest step and that step's metrics."""
        newest = self._newest()
        return {
            "event": "watching",
            "run_key": self._run.run_key,
            "checkpoint_dir": self._run.history.store.url,
            "step": newest.step if newest else None,
            "metrics": dict(newest.metrics) if newest else {},
        }

    def new(self) -> list[dict[str, Any]]:
        """Return the events since the last call; an outage of the store is one event."""
        events = []
        try:
            self._head = self._run.head()
            while self._next_n < self._head.next_n:
                events.append(self._entry(self._next_n))
                self._next_n += 1
            events += self._owner()
            events += self._live_steps()
            self._store_error = None
        except StoreError as error:
            if self._store_error is None:
                events.append({"event": "trouble", "text": str(error)})
            self._store_error = str(error)
        self._shown.extend(event for event in events if event["event"] not in _QUIET)
        return events

    def _entry(self, n: int) -> dict[str, Any]:
        from ckpt_tasks.run.ledger.timeline import moment

        try:
            entry, _ = self._run.history.read_entry(n)
        except (IntegrityError, ObjectNotFoundError) as error:
            return {"event": "damaged", "n": n, "text": str(error)}
        event = moment(entry)
        if event is None:
            return _raw(entry)
        if event.kind == "commit":
            self._commits.append(event)
        return _event(event)

    def _owner(self) -> list[dict[str, Any]]:
        """Return an event that says whether the owner is alive: at the first call, and after each change."""
        from ckpt_tasks.run.ledger.ownership import identify, why_free

        owner = self._head.state.owner
        silent_s = None if owner is None or owner.released else self._signs.silent_s(owner)
        free = why_free(owner, identify(None), silent_s, self._timeout_s)
        changed = not self._owner_known or (free is None) != (self._free is None)
        self._free, self._owner_known = free, True
        if not changed:
            return []
        text = free or (f"process {owner.pid} on {owner.host}" if owner else "")
        return [{"event": "owner", "alive": free is None, "text": text}]

    def _live_steps(self) -> list[dict[str, Any]]:
        """Return an event with the newest step that the owner has not committed, if it is new."""
        from ckpt_tasks.run.ledger.live_steps import read_live_steps

        newest, before = self._newest(), self._live[-1:]
        owner = self._head.state.owner if self._free is None else None
        self._live = read_live_steps(self._run.history.store, owner, newest.step if newest else None)
        if not self._live or self._live[-1:] == before:
            return []
        last = self._live[-1]
        return [{"event": "live", "step": last.step, "metrics": last.metrics, "committed": newest and newest.step}]

    def _newest(self) -> Checkpoint | None:
        from ckpt_tasks.format.ledger import lineage

        return next(iter(lineage(self._head.state.live)), None)

    def rate(self) -> float | None:
        """Return steps per second between the last two commits of one owner; None before there are two."""
        if len(self._commits) < 2:
            return None
        before, last = self._commits[-2], self._commits[-1]
        steps, took_s = (last.step or 0) - (before.step or 0), last.at_s - before.at_s
        return steps / took_s if before.epoch == last.epoch and steps > 0 and took_s > 0 else None

    def panel(self, width: int) -> RenderableType:
        """Return the whole screen for a terminal of `width` columns."""
        from rich.console import Group
        from rich.text import Text

        newest, rate, owner = self._newest(), self.rate(), self._head.state.owner
        lines: list[Any] = [title(self._run)]
        if newest is None:
            lines.append("There is no checkpoint yet.")
        else:
            speed = "" if rate is None else f", {number(rate)} steps/s"
            saved = (
                f"saved {age(newest.saved_at)}, {size(newest.size_bytes)}, training waited {fine_span(newest.cost_s)}"
            )
            lines += [[("step ", "dim"), (f"{newest.step:,}", "bold"), speed], [("last commit ", "dim"), saved]]
        for last in self._live[-1:]:
            shown = ", ".join(f"{printable(name)} {number(value)}" for name, value in [*last.metrics.items()][:3])
            lines.append([("now at ", "dim"), (f"step {last.step:,}", "bold"), f", not committed yet: {shown}"])
        if self._free is None and owner is not None:
            lines.append([("owner ", "dim"), ("alive", "green"), f": process {owner.pid} on {owner.host}"])
        else:
            lines.append([("owner ", "dim"), (f"none: {self._free or ''}", "yellow")])
        lines += self._curve(width)
        events = [Text(printable(_line(each)), style="dim", overflow="ellipsis", no_wrap=True) for each in self._shown]
        outage = [(f"The store does not answer: {self._store_error}", "red")] if self._store_error else []
        return Group(*map(rendered, [*lines, *events, *outage, ("Ctrl-C ends it; the run continues.", "dim")]))

    def _curve(self, width: int) -> list[Any]:
        from ckpt_tasks.run.report.picture import main_metric

        name = main_metric(commit.metrics for commit in self._commits)
        if name is None:
            return []
        known: list[Mapping[str, float]] = [one.metrics for one in self._commits]
        known += [one.metrics for one in self._live]
        values = [metrics[name] for metrics in known if name in metrics]
        label, last = printable(f"{name} "), f" {number(values[-1])}"
        return [[(label, "dim"), sparkline(values, width - len(label) - len(last)), last]]


def sparkline(values: list[float], width: int) -> str:
    """Draw the newest `width` values, one character each; a non-finite value is a gap."""
    import math

    shown = values[-max(width, 1) :]
    known = [value for value in shown if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    top = len(_BARS) - 1
    return "".join(
        " " if not math.isfinite(v) else _BARS[0 if high == low else round((v - low) / (high - low) * top)]
        for v in shown
    )


def _event(moment: Moment) -> dict[str, Any]:
    from datetime import UTC, datetime

    at = datetime.fromtimestamp(moment.at_s, UTC).isoformat(timespec="milliseconds")
    event: dict[str, Any] = {"event": moment.kind, "n": moment.n, "at": at}
    if moment.step is not None:
        event["step"] = moment.step
    if moment.metrics:
        event["metrics"] = dict(moment.metrics)
    return {**event, "text": moment.text} if moment.text else event


def _raw(entry: Entry) -> dict[str, Any]:
    kind = str(entry.event.get("note") if entry.event["kind"] == "note" else entry.event["kind"])
    kind = "unpin" if kind == "pin" and entry.event.get("reason") is None else kind
    step = entry.event.get("step")
    words = [str(entry.event[name]) for name in ("reason", "holder") if entry.event.get(name)]
    event: dict[str, Any] = {
        "event": kind,
        "n": entry.n,
        "at": entry.at,
        **({"step": step} if step is not None else {}),
    }
    return {**event, "text": words[0]} if words else event


def _line(event: dict[str, Any]) -> str:
    from ckpt_tasks.run.report.picture import sort_metrics
    from ckpt_tasks.run.report.words import when

    metrics = event.get("metrics") or {}
    parts = [
        when(event["at"])[11:] if "at" in event else "        ",
        f"step {event['step']}" if event.get("step") is not None else "",
        ("alive" if event["alive"] else "none") if "alive" in event else "",
        ", ".join(f"{name} {number(metrics[name])}" for name in sort_metrics(metrics)[:3]),
        event.get("text", ""),
    ]
    said = [printable(part) for part in parts[1:] if part]
    return f"{parts[0]}  {event['event']:<10} {', '.join(said)}".rstrip()


# ── serve ────────────────────────────────────────────────────────────────────────────────────────────────────────

_TOKEN = "CKPT_SERVE_TOKEN"  # noqa: S105 (a variable's name)

RunsArgument = Annotated[str, argument("DIR", "a directory that holds runs, or a run", complete_run)]
PortOption = Annotated[int, option("--port", "N", "the port; 0: any that is free")]
HostOption = Annotated[str, option("--host", "ADDRESS", "listen at this address; others than this host need a token")]
OpenOption = Annotated[bool, option("--open", None, "open the page in a browser")]


def serve(
    root: RunsArgument,
    *,
    port: PortOption = 8123,
    host: HostOption = "127.0.0.1",
    show: OpenOption = False,
    as_json: JsonOption = False,
) -> None:
    """Serve a page of all runs.

    The page has a live table with search, curves of chosen runs over each other, and all that a report says of a run.
    Serves until Ctrl-C, only reads, and works offline. /metrics has the runs' metrics for Prometheus. At an address
    that other hosts can reach, every request needs a token: CKPT_SERVE_TOKEN, or else a new token, which is printed.
    --json only prints the table, and listens nowhere.
    """
    from ckpt_tasks.cli.serving.access import is_loopback
    from ckpt_tasks.cli.serving.run_table import RunTable
    from ckpt_tasks.cli.serving.server import PageServer
    from ckpt_tasks.storage.locations import Location

    with output(as_json) as out:
        table = RunTable(Location(root).open())
        if as_json:
            table.look()
            out.answer({name: value for name, value in table.since(-1).items() if name in ("root", "rows", "error")})
            out.fail(bool(table.error))
            return
        token = os.environ.get(_TOKEN) or (None if is_loopback(host) else secrets.token_urlsafe(24))
        try:
            server = PageServer(table, host, port, token)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{host}:{port} cannot be listened at: {error}", hint="--port 0 takes a free one."
            ) from error
        address = f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}/"
        address += f"?token={quote(token, safe='')}" if token else ""
        out.print(f"Serving {table.root.url} at {address} until Ctrl-C.")
        if table.root.near and not Path(table.root.url).is_dir():
            out.print(f"There is no directory {table.root.url} yet: runs appear here when it is made.")
        table.start()
        if show:
            webbrowser.open(address)
        with server, suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.1)
