"""`ckpt doctor-store`: find out what a store can do and how fast it is, before a run depends on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.output import JsonOption, Output, console, output, table
from ckpt_tasks.report.words import printable, size, span

if TYPE_CHECKING:
    from ckpt_tasks.storage.probe import Ability, Findings, Latency, Verdict

__all__ = ["doctor_store"]

_SIZES_BYTES = (1 << 30, 10 << 30, 100 << 30)
_MEANS = {
    "list": "a new object is listed",
    "write": "objects can be written",
    "delete": "objects can be deleted",
    "read": "what was written is seen at once",
    "ordered listing": "the newest lists first",
    "ranged reads": "a part of an object can be read",
    "put if absent": "if several write one name, exactly one wins",
    "large objects": "a large object comes back as it was",
    "conditional multipart": "the same for large objects (not needed)",
}

UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="a directory, or a URL such as s3://bucket/runs", show_default=False)
]


def doctor_store(url: UrlArgument, as_json: JsonOption = False) -> None:
    """Test what a store can do, and how fast.

    Exits with 0 if it is fit for checkpoints, else with 1. Writes at most 64 MiB at a time below URL/probe, and deletes
    it again. Does not touch a run at URL.
    """
    with output(as_json) as out:
        findings, verdict = _measure(out, url)
        out.data(_facts(findings, verdict))
        if not as_json:
            _print(out, findings, verdict)
        if not verdict.fit:
            out.fail()


def _measure(out: Output, url: str) -> tuple[Findings, Verdict]:
    from ckpt_tasks.storage.locations import Location
    from ckpt_tasks.storage.measuring import measure
    from ckpt_tasks.storage.probe import judge
    from ckpt_tasks.storage.retrying import RetryingStore

    store = Location(url).open()
    with _saying(out) as on_progress:
        # No retries: they would hide the faults that this test looks for.
        findings = measure(store.inner if isinstance(store, RetryingStore) else store, on_progress=on_progress)
    return findings, judge(findings)


@contextmanager
def _saying(out: Output) -> Iterator[Callable[[str], None]]:
    """Show the current test on a terminal; remove the line at the end."""
    screen = console(stderr=True)
    if out.as_json or not screen.is_terminal:
        yield lambda doing: None
        return
    with screen.status("") as status:
        yield lambda doing: status.update(f"{doing} …")


def _facts(findings: Findings, verdict: Verdict) -> dict[str, Any]:
    return {
        "url": findings.url,
        "endpoint": findings.endpoint,
        "fit": verdict.fit,
        "verdict": verdict.words,
        "abilities": {name: asdict(ability) for name, ability in findings.abilities.items()},
        "latencies": {name: asdict(latency) for name, latency in findings.latencies.items()},
        "bandwidth": {
            "object_bytes": findings.large_bytes,
            "up_bytes_per_s": findings.up_bytes_per_s,
            "down_bytes_per_s": findings.down_bytes_per_s,
        },
        "disk": None if findings.disk is None else asdict(findings.disk),
        "estimates": [
            {"size_bytes": one, "save_s": findings.save_s(one), "restore_s": findings.restore_s(one)}
            for one in _SIZES_BYTES
        ],
        "left": list(findings.left),
    }


def _print(out: Output, findings: Findings, verdict: Verdict) -> None:
    from rich.text import Text

    who = f"  {findings.endpoint}" if findings.endpoint else ""
    out.print(Text.assemble((printable(findings.url), "bold"), (printable(who), "dim")), _abilities(findings))
    if findings.latencies:
        out.print(_latencies(findings))
    if findings.up_bytes_per_s is not None and findings.down_bytes_per_s is not None:
        up, down = (rate / (1 << 20) for rate in (findings.up_bytes_per_s, findings.down_bytes_per_s))
        what = f"{size(findings.large_bytes)} in one object"
        out.print(f"Bandwidth: {up:,.0f} MiB/s up, {down:,.0f} MiB/s down, of {what}.", _estimates(findings))
    if findings.disk is not None:
        out.print(f"Free: {size(findings.disk.free_bytes)}.")
    if findings.left:
        out.print(Text("Still there, since it could not be deleted:", style="yellow"))
        out.print(*(Text(f"  {name}", style="yellow") for name in findings.left))
    word, colon, why = verdict.words.partition(":")
    style = "bold green" if verdict.fit else "bold yellow" if word.startswith("only") else "bold red"
    out.print(Text.assemble((word[0].upper() + word[1:], style), f"{colon}{printable(why)}."))


def _abilities(findings: Findings) -> Any:
    made = table("ability", "there", "seen")
    rows = [(_MEANS.get(name, name), ability) for name, ability in findings.abilities.items()]
    if findings.disk is not None:
        rows += [("O_DIRECT works", findings.disk.o_direct), ("link(2) works", findings.disk.link)]
    for means, ability in rows:
        made.add_row(means, _word(ability), printable(ability.seen), style="" if ability.works else "yellow")
    return made


def _word(ability: Ability) -> str:
    return {True: "yes", False: "no", None: "not tried"}[ability.works]


def _latencies(findings: Findings) -> Any:
    made = table("request", "median", "90 % within", "failed", right=("median", "90 % within", "failed"))
    rows = dict(findings.latencies)
    if findings.disk is not None:
        rows["fsync"] = findings.disk.fsync
    for name, latency in rows.items():
        made.add_row(name, _ms(latency.median_s), _ms(latency.p90_s), _failed(latency))
    return made


def _estimates(findings: Findings) -> Any:
    headings = ("checkpoint", "save, in the background", "restore")
    made = table(*headings, right=headings)
    for size_bytes in _SIZES_BYTES:
        times_s = (findings.save_s(size_bytes), findings.restore_s(size_bytes))
        made.add_row(size(size_bytes), *("" if time_s is None else span(time_s) for time_s in times_s))
    return made


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f} ms" if math.isfinite(seconds) else ""


def _failed(latency: Latency) -> str:
    return f"{latency.failed} of {latency.tries}" if latency.failed else ""
