"""`ckpt doctor`, `doctor-store`, `verify`, `restore-drill`: what would keep a run from resuming, or is damaged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.arguments import (
    CheckpointArgument,
    JsonOption,
    RunOrCheckpointArgument,
    argument,
    complete_run,
    importing_prefect,
    option,
    parse_target,
)
from ckpt_tasks.cli.output import Column, Output, column, console, first, listing, output, reading, row_facts, title
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.run.report.words import age, check_words, count, fine_span, size
from ckpt_tasks.storage.port import WatchedStore

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.restore.reading import Run
    from ckpt_tasks.cli.doctor.checks import Check
    from ckpt_tasks.cli.doctor.findings import Findings, StoreVerdict
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.run.upkeep.verifying import RunFaults

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
    nothing; only if DIR has no run yet, it writes a few small objects below DIR/probe and deletes them. Exits with 1 if
    something is wrong.
    """
    from ckpt_tasks.cli.doctor.host import check_place

    with output(as_json) as out:
        checks = [*_of_prefect(pool, deployment), *check_place(directory)]
        wrong, warnings = (sum(check.verdict == verdict for check in checks) for verdict in ("wrong", "warning"))
        result = (f"Wrong: {wrong}", "bold red") if wrong else ("Nothing is wrong", "bold green")
        facts = {"well": not wrong, "checks": [asdict(check) for check in checks]}
        out.answer(facts, [listing(_CHECKS, checks), [result, f", warnings: {warnings}."]])
        out.fail(bool(wrong))


def _of_prefect(pool: str | None, deployment: str | None) -> list[Check]:
    from ckpt_tasks.cli.doctor.checks import Check

    try:
        with importing_prefect():
            from ckpt_tasks.cli.doctor.server_checks import check_prefect  # The import takes seconds.
    except ConfigError as error:
        return [Check("server", "wrong", error.message, error.hint or "")]
    return check_prefect(pool, deployment)


# ── a store ──────────────────────────────────────────────────────────────────────────────────────────────────────

_MEANS = {
    "list": "a new object is listed",
    "write": "objects can be written",
    "delete": "objects can be deleted",
    "read": "what was written is seen at once",
    "ordered listing": "the newest lists first",
    "ranged reads": "a part of an object can be read",
    "conditional write": "if several write one name, exactly one wins",
    "large objects": "a large object comes back as it was",
    "conditional multipart": "the same for large objects (not needed)",
    "o_direct": "O_DIRECT works",
    "link": "link(2) works",
}


def doctor_store(url: UrlArgument, as_json: JsonOption = False) -> None:
    """List what the store at URL can do.

    Exits with 0 if the store is fit for checkpoints, else with 1. Writes at most 64 MiB at a time below URL/probe, and
    deletes what it wrote. Does not touch a run at URL.
    """
    from ckpt_tasks.cli.doctor.findings import judge
    from ckpt_tasks.cli.doctor.measuring import try_store
    from ckpt_tasks.storage.locations import Location
    from ckpt_tasks.storage.retrying import RetryingStore

    with output(as_json) as out:
        store = Location(url).open()
        with _saying(out) as on_progress:
            # Retries would hide the faults that this test looks for.
            inner = store.inner if isinstance(store, RetryingStore) else store
            findings = try_store(inner, on_progress=on_progress)
        verdict = judge(findings)
        facts = {
            "url": findings.url,
            "endpoint": findings.endpoint,
            "fit": verdict.fit,
            "verdict": verdict.words,
            "abilities": {name: asdict(ability) for name, ability in findings.abilities.items()},
            "disk": None if findings.disk is None else asdict(findings.disk),
            "left": list(findings.left),
        }
        out.answer(facts, _parts(findings, verdict))
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


_ABILITIES = (
    column("ability", lambda row: _MEANS.get(row[0], row[0])),
    column("there", lambda row: {True: "yes", False: "no", None: "not tried"}[row[1].works]),
    column("seen", lambda row: row[1].seen),
)


def _parts(findings: Findings, verdict: StoreVerdict) -> Iterator[Any]:
    abilities = dict(findings.abilities)
    disk = findings.disk
    if disk is not None:
        abilities |= {"o_direct": disk.o_direct, "link": disk.link}
    yield [(findings.url, "bold"), (f"  {findings.endpoint}" if findings.endpoint else "", "dim")]
    yield listing(_ABILITIES, abilities.items(), lambda row: "" if row[1].works else "yellow")
    if disk is not None:
        yield f"Free: {size(disk.free_bytes)}."
    if findings.left:
        yield "Still there, since it could not be deleted:", "yellow"
        yield from ((f"  {name}", "yellow") for name in findings.left)
    word, colon, why = verdict.words.partition(":")
    style = "bold green" if verdict.fit else "bold yellow" if word.startswith("only") else "bold red"
    yield [(word[0].upper() + word[1:], style), f"{colon}{why}."]


# ── what a run has stored ────────────────────────────────────────────────────────────────────────────────────────

_FAULTS_SHOWN = 8

HistoryOption = Annotated[bool, typer.Option("--history", help="on a server, read every ledger entry")]


def verify(target: RunOrCheckpointArgument, history: HistoryOption = False, as_json: JsonOption = False) -> None:
    """Read DIR or DIR@STEP back, and list what is damaged.

    Exits with 1 if anything is damaged. Checks sizes, headers and the digests of all bytes, and that the stored regions
    make whole tensors. Does not disturb a training process. Without @STEP, also checks the evaluations and the ledger:
    in a local directory all entries; on a server those on which checkpoints depend, or all with --history. Then also
    lists orphaned objects, which are not a fault, and records the result in the run if possible, for `ckpt ls` and
    `ckpt metrics`.
    """
    from ckpt_tasks.run.upkeep.verifying import record_verification

    with output(as_json) as out:
        parsed = parse_target(target)
        run = parsed.open()
        only = None if parsed.which is None else run.find(parsed.which)
        if only and history:
            raise ConfigError("--history is for a whole run", hint="Leave out @STEP, or --history.")
        began = time.monotonic()
        faults, size_bytes = _read(out, run, only, history or None)
        took_s = time.monotonic() - began
        unrecorded = "" if only else record_verification(run.history, faults)
        facts = {
            "run_key": run.run_key,
            "checkpoint_dir": run.history.store.url,
            "good": faults.good,
            "checkpoints": row_facts(_COLUMNS, faults.checkpoints.values()),
            "damaged": list(faults.damaged),
            "orphans": list(faults.orphans),
            "unread_entries": faults.unread,
            "read_bytes": size_bytes,
            "took_s": round(took_s, 3),
            "recorded": not only and not unrecorded,
        }
        out.answer(facts, _fault_parts(run, faults, f"{size(size_bytes)} read in {fine_span(took_s)}", unrecorded))
        out.fail(not faults.good)


def _read(out: Output, run: Run, only: Checkpoint | None, whole: bool | None) -> tuple[RunFaults, int]:
    from ckpt_tasks.run.ledger.history import History
    from ckpt_tasks.run.upkeep.verifying import RunFaults, verify_checkpoint, verify_run_directory

    live = [only] if only else run.checkpoints()
    done = [0]
    with reading(out, "verifying", sum(c.size_bytes for c in live)) as on_progress:

        def both(size_bytes: int) -> None:
            done[0] += size_bytes
            on_progress(size_bytes)

        store = WatchedStore(run.history.store, both)
        if only is None:
            return verify_run_directory(History(store), whole=whole), done[0]
        checkpoints = {only.manifest_digest: (only, tuple(verify_checkpoint(store, only)))}
        return RunFaults(checkpoints, (), ()), done[0]


def _is_unreadable(fault: str) -> bool:
    from ckpt_tasks.run.upkeep.verifying import UNREADABLE

    return fault.startswith(UNREADABLE)


def _result(row: tuple[Checkpoint, tuple[str, ...]]) -> str:
    place = row[0].manifest.rpartition("/")[0] + "/"
    faults = [fault if _is_unreadable(fault) else fault.replace(place, "") for fault in row[1]]
    return "\n".join(first(faults, _FAULTS_SHOWN)) or "good"


_COLUMNS = (
    Column("step", "step", lambda row: row[0].step, numbers=True),
    Column("manifest_digest", None, lambda row: row[0].manifest_digest),
    Column("good", None, lambda row: not row[1]),
    Column("faults", None, lambda row: list(row[1])),
    column("saved", lambda row: row[0].saved_at, age),
    column("size", lambda row: row[0].size_bytes, size, numbers=True),
    column("result", _result),
)


def _fault_parts(run: Run, faults: RunFaults, work: str, unrecorded: str) -> Iterator[Any]:
    yield title(run)
    yield listing(_COLUMNS, faults.checkpoints.values(), lambda row: "red" if row[1] else "")
    for names, what, style in (
        (faults.damaged, "Damaged beside the checkpoints", "red"),
        (faults.orphans, "Orphaned, the next owner deletes them", "dim"),
    ):
        if names:
            yield f"{what}: {count(len(names), 'object')}", style
            yield from ((f"  {name}", style) for name in first(names, _FAULTS_SHOWN))
    if faults.unread:
        older = count(faults.unread, "older ledger entry", "older ledger entries")
        yield f"Not read without --history: {older}", "dim"
    if unrecorded:
        yield f"The run does not keep this result: {unrecorded}.", "yellow"
    bad, checked = sum(1 for _, wrong in faults.checkpoints.values() if wrong), len(faults.checkpoints)
    if faults.good:
        yield [("Good", "bold green"), f": {count(checked, 'checkpoint')}, {work}."]
    elif bad:
        others = bad < len(run.checkpoints())
        then = " A restore passes over them." if others else " There is none that could be restored."
        if any(wrong and _is_unreadable(wrong[0]) for _, wrong in faults.checkpoints.values()):
            then = " A restore does not pass over what cannot be read: it waits, and then fails."
        yield [("Damaged", "bold red"), f": {bad} of {count(checked, 'checkpoint')}, {work}.{then}"]
    else:
        yield [("Damaged", "bold red"), f": the checkpoints are good, the run's records are not, {work}."]


# ── restore-drill ────────────────────────────────────────────────────────────────────────────────────────────────


def restore_drill(
    target: CheckpointArgument,
    program: Annotated[
        str | None, option("--program", "MODULE:PROGRAM", "the program [default: the run's]", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Restore DIR into its program, in a fresh process per rank.

    Restores the newest checkpoint, or the one that @STEP names, on this host, and records the result in the run. Exits
    with 1 if the restore fails: because of damage, or because the program cannot be built or does not fit. `ckpt ls`
    and `ckpt doctor` show the last good drill. Does not disturb a process that trains the run. Runs the program's code,
    and needs as much memory as the program's state.
    """
    from ckpt_tasks.flows.session.drill import drill_run
    from ckpt_tasks.storage.locations import Location

    with output(as_json) as out:
        parsed = parse_target(target)
        run = parsed.open()
        drill = drill_run(Location(parsed.checkpoint_dir), program, which=parsed.which or "latest")
        facts = {"run_key": run.run_key, "checkpoint_dir": run.history.store.url, "good": drill.fault is None}
        out.answer({**facts, **asdict(drill)}, [title(run), (check_words(drill), "red" if drill.fault else "green")])
        out.fail(drill.fault is not None)
