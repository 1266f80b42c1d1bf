"""`ckpt doctor` and `ckpt doctor-store`: whether killed runs would resume, and what a store can do and how fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

from ckpt_tasks.cli.arguments import JsonOption, argument, complete_run, option
from ckpt_tasks.cli.output import Output, column, console, listing, output
from ckpt_tasks.cli.settings import importing_prefect
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.report.words import size, span

if TYPE_CHECKING:
    from ckpt_tasks.doctor.checks import Check
    from ckpt_tasks.doctor.findings import Findings, StoreVerdict

DirectoryArgument = Annotated[str | None, argument("[DIR]", "a run directory, existing or new", complete_run)]
PoolOption = Annotated[str | None, option("--pool", "NAME", "the work pool (default: ckpt-tasks)", show_default=False)]
DeploymentOption = Annotated[
    str | None, option("--deployment", "FLOW/NAME", "check only this deployment", show_default=False)
]
UrlArgument = Annotated[str, argument("URL", "a directory, or a URL such as s3://bucket/runs")]

_STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red", "not checked": "dim"}
_CHECKS = (
    column("check", "name"),
    column("", lambda check: (check.verdict, _STYLES[check.verdict]), tuple),
    column("seen", "seen"),
    column("what to do", "do"),
)


def doctor(
    directory: DirectoryArgument = None,
    *,
    pool: PoolOption = None,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what keeps killed runs from resuming by themselves.

    Checks Prefect's server, automations and work pool, the store of DIR, this host's memory and the clocks. Changes
    nothing; if DIR holds no run yet, it writes a few small objects below DIR/probe and deletes them. Exits with 1 if
    something is wrong.
    """
    from ckpt_tasks.doctor.host import check_place

    with output(as_json) as out:
        checks = [*_of_prefect(pool, deployment), *check_place(directory)]
        wrong, warnings = (sum(check.verdict == verdict for check in checks) for verdict in ("wrong", "warning"))
        result = (f"Wrong: {wrong}", "bold red") if wrong else ("Nothing is wrong", "bold green")
        facts = {"well": not wrong, "checks": [asdict(check) for check in checks]}
        out.answer(facts, [listing(_CHECKS, checks), [result, f", warnings: {warnings}."]])
        out.fail(bool(wrong))


def _of_prefect(pool: str | None, deployment: str | None) -> list[Check]:
    from ckpt_tasks.doctor.checks import Check

    try:
        with importing_prefect():
            from ckpt_tasks.doctor.server import check_prefect  # The import takes seconds.
    except ConfigError as error:
        return [Check("server", "wrong", error.message, error.hint or "")]
    return check_prefect(pool, deployment)


# ── a store ──────────────────────────────────────────────────────────────────────────────────────────────────────

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
    "o_direct": "O_DIRECT works",
    "link": "link(2) works",
}


def doctor_store(url: UrlArgument, as_json: JsonOption = False) -> None:
    """List what the store at URL can do, and how fast.

    Exits with 0 if it is fit for checkpoints, else with 1. Writes at most 64 MiB at a time below URL/probe, and deletes
    it again. Does not touch a run at URL.
    """
    from ckpt_tasks.doctor.findings import judge
    from ckpt_tasks.doctor.measuring import measure
    from ckpt_tasks.storage.locations import Location
    from ckpt_tasks.storage.retrying import RetryingStore

    with output(as_json) as out:
        store = Location(url).open()
        with _saying(out) as on_progress:
            # Retries would hide the faults that this test looks for.
            inner = store.inner if isinstance(store, RetryingStore) else store
            findings = measure(inner, on_progress=on_progress)
        verdict = judge(findings)
        facts = {
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
        out.answer(facts, _parts(findings, verdict, facts["estimates"]))
        out.fail(not verdict.fit)


@contextmanager
def _saying(out: Output) -> Iterator[Callable[[str], None]]:
    """Show the current test on a terminal; remove the line at the end."""
    screen = console(stderr=True)
    if out.as_json or not screen.is_terminal:
        yield lambda doing: None
        return
    with screen.status("") as status:
        yield lambda doing: status.update(f"{doing} …")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f} ms" if math.isfinite(seconds) else ""


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else span(seconds)


_ABILITIES = (
    column("ability", lambda row: _MEANS.get(row[0], row[0])),
    column("there", lambda row: {True: "yes", False: "no", None: "not tried"}[row[1].works]),
    column("seen", lambda row: row[1].seen),
)
_LATENCIES = (
    column("request", itemgetter(0)),
    column("median", lambda row: row[1].median_s, _ms, numbers=True),
    column("90 % within", lambda row: row[1].p90_s, _ms, numbers=True),
    column("failed", lambda row: f"{row[1].failed} of {row[1].tries}" if row[1].failed else "", numbers=True),
)
_ESTIMATES = (
    column("checkpoint", itemgetter("size_bytes"), size, numbers=True),
    column("save, in the background", itemgetter("save_s"), _seconds, numbers=True),
    column("restore", itemgetter("restore_s"), _seconds, numbers=True),
)


def _parts(findings: Findings, verdict: StoreVerdict, estimates: Any) -> Iterator[Any]:
    abilities, latencies = dict(findings.abilities), dict(findings.latencies)
    disk = findings.disk
    if disk is not None:
        abilities |= {"o_direct": disk.o_direct, "link": disk.link}
        latencies["fsync"] = disk.fsync
    yield [(findings.url, "bold"), (f"  {findings.endpoint}" if findings.endpoint else "", "dim")]
    yield listing(_ABILITIES, abilities.items(), lambda row: "" if row[1].works else "yellow")
    if findings.latencies:
        yield listing(_LATENCIES, latencies.items())
    if findings.up_bytes_per_s is not None and findings.down_bytes_per_s is not None:
        up, down = (rate / (1 << 20) for rate in (findings.up_bytes_per_s, findings.down_bytes_per_s))
        what = f"{size(findings.large_bytes)} in one object"
        yield f"Bandwidth: {up:,.0f} MiB/s up, {down:,.0f} MiB/s down, of {what}."
        yield listing(_ESTIMATES, estimates)
    if disk is not None:
        yield f"Free: {size(disk.free_bytes)}."
    if findings.left:
        yield "Still there, since it could not be deleted:", "yellow"
        yield from ((f"  {name}", "yellow") for name in findings.left)
    word, colon, why = verdict.words.partition(":")
    style = "bold green" if verdict.fit else "bold yellow" if word.startswith("only") else "bold red"
    yield [(word[0].upper() + word[1:], style), f"{colon}{why}."]
