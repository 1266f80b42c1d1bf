"""`ckpt doctor`: check what a run needs to resume by itself, and say how to mend it."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.completion import complete_run
from ckpt_tasks.cli.output import JsonOption, Output, output, table
from ckpt_tasks.cli.settings import importing_prefect
from ckpt_tasks.errors import CkptError, ConfigError, ObjectNotFoundError
from ckpt_tasks.report.words import printable

if TYPE_CHECKING:
    from ckpt_tasks.policy.health import Check, MemoryFacts
    from ckpt_tasks.reading.reading import Run
    from ckpt_tasks.storage.port import Store

__all__ = ["doctor"]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (not a temporary file: it has to outlive the process)
_DEADLINE_S = 5.0
_SMALL_BYTES = 1 << 16  # enough to see whether it works; `ckpt doctor-store` measures speed
_WRITTEN = ("ledger", "heartbeat")  # where every owner writes, beside its own new directories
_STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red", "not checked": "dim"}

DirectoryArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[DIR]", help="a run directory, existing or new", show_default=False, autocompletion=complete_run
    ),
]
PoolOption = Annotated[
    str | None, typer.Option("--pool", metavar="NAME", help="the work pool (default: ckpt-tasks)", show_default=False)
]
DeploymentOption = Annotated[
    str | None, typer.Option("--deployment", metavar="FLOW/NAME", help="check only this deployment", show_default=False)
]


def doctor(
    directory: DirectoryArgument = None,
    *,
    pool: PoolOption = None,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check whether killed runs would resume by themselves.

    Checks Prefect's server, automations and work pool, the store of DIR, this host's memory and the clocks. Changes
    nothing; if DIR holds no run yet, it writes a few small objects below DIR/probe and deletes them. Exits with 1 if
    something is wrong.
    """
    with output(as_json) as out:
        checks = [*_of_prefect(pool, deployment), *_of_place(directory)]
        wrong = sum(check.verdict == "wrong" for check in checks)
        out.data({"well": not wrong, "checks": [asdict(check) for check in checks]})
        if not as_json:
            _print(out, checks, wrong)
        if wrong:
            out.fail()


def _of_prefect(pool: str | None, deployment: str | None) -> list[Check]:
    from ckpt_tasks.policy.health import Check

    try:
        with importing_prefect():
            from ckpt_tasks.orchestration.doctor import check_prefect  # takes seconds
    except ConfigError as error:
        return [Check("server", "wrong", error.message, error.hint or "")]
    return check_prefect(pool, deployment)


def _of_place(directory: str | None) -> list[Check]:
    from ckpt_tasks.policy.health import Check, judge_memory
    from ckpt_tasks.storage.locations import Location
    from ckpt_tasks.storage.retrying import RetryingStore

    if directory is None:
        return [Check("store", "not checked", "no DIR was named"), judge_memory(_memory(None, None))]
    try:
        store = Location(directory).open()
        inner = store.inner if isinstance(store, RetryingStore) else store
        patient = RetryingStore(inner, deadline_s=_DEADLINE_S)
        seen, run = _store(inner, patient)
        newest = next(iter(run.checkpoints()), None) if run is not None else None
        disk = _disk(inner, run)
    except CkptError as error:
        return [Check("store", "wrong", error.message, error.hint or ""), judge_memory(_memory(None, None))]
    memory = judge_memory(_memory(inner.url, newest.size_bytes if newest else None))
    return [seen, *disk, *_clock(inner.endpoint), memory]


def _store(store: Store, patient: Store) -> tuple[Check, Run | None]:
    """Check the run at the store, or probe the store if it holds none; also return the run."""
    from ckpt_tasks.format.keys import FORMAT_NAME
    from ckpt_tasks.ledger.history import History
    from ckpt_tasks.policy.health import Check
    from ckpt_tasks.reading.reading import Run

    try:
        data = patient.get(FORMAT_NAME, 1 << 20)
    except ObjectNotFoundError:
        return _tried(store), None
    history = History(patient)
    key = history.check(None)
    if key is None:
        return Check("store", "wrong", f"{store.url}: format.json is damaged", "ckpt verify says what else is."), None
    return _proved(store, key, json.loads(data)), Run(history, key)


def _proved(store: Store, key: str, written: dict[str, Any]) -> Check:
    from ckpt_tasks.policy.health import Check

    seen = f"{store.url} holds the run {key!r}"
    if store.endpoint is None:
        return Check("store", "ok", f"{seen}; of two writers one loses (link)")
    if written.get("single_writer"):
        do = "See to it that one process at a time writes, or use a store with conditional puts."
        return Check("store", "warning", f"{seen}; nothing but you keeps a second writer out (single_writer)", do)
    if written.get("endpoint") != store.endpoint:
        return Check("store", "ok", f"{seen}; {store.endpoint} is tried when the next process takes it")
    proved = written.get("proved")
    if not isinstance(proved, dict) or proved.get("put_if_absent") is not True:
        return Check("store", "warning", f"{seen}; put-if-absent has not been proved", f"ckpt doctor-store {store.url}")
    return Check("store", "ok", f"{seen}; put-if-absent was proved when it was made")


def _tried(store: Store) -> Check:
    from ckpt_tasks.policy.health import Check
    from ckpt_tasks.storage.measuring import measure
    from ckpt_tasks.storage.probe import judge

    verdict = judge(measure(store, large_bytes=_SMALL_BYTES))
    seen = f"{store.url}: no run yet; {verdict.words}"
    return Check("store", "ok" if verdict.fit else "wrong", seen, "" if verdict.fit else "ckpt doctor-store says more.")


def _disk(store: Store, run: Run | None) -> list[Check]:
    """Check, without writing, whether a local run can be written; a directory without a run has just been probed."""
    from ckpt_tasks.policy.health import DiskFacts, judge_disk
    from ckpt_tasks.reading.room import forecast_run
    from ckpt_tasks.storage.space import free_bytes

    directories = [path for path in (Path(store.url), *map(Path(store.url).joinpath, _WRITTEN)) if path.is_dir()]
    if store.endpoint is not None or not (Path(store.url) / "ledger").is_dir():
        return []
    unwritable = [str(path) for path in directories if not os.access(path, os.W_OK | os.X_OK, effective_ids=True)]
    free = free_bytes(store) or 0
    facts = DiskFacts(
        unwritable=next(iter(unwritable), None),
        free_bytes=free,
        forecast=None if run is None else forecast_run(run, None, free),
    )
    return [judge_disk(facts)]


def _clock(endpoint: str | None) -> list[Check]:
    if endpoint is None or "://" not in endpoint:
        return []
    from ckpt_tasks.orchestration.doctor import clock_of
    from ckpt_tasks.policy.health import judge_clock

    return [judge_clock("store's clock", *clock_of(endpoint), "the store")]


def _memory(url: str | None, size_bytes: int | None) -> MemoryFacts:
    from ckpt_tasks.policy.health import MemoryFacts
    from ckpt_tasks.snapshot.memory import SLOTS, default_directory

    if not _SHARED_MEMORY.is_dir():
        return MemoryFacts(directory=str(_SHARED_MEMORY), there=False)
    status = os.statvfs(_SHARED_MEMORY)
    needed_bytes = None if size_bytes is None else size_bytes * len(SLOTS)
    fits = None
    if needed_bytes is not None and url is not None:
        fits = default_directory(max(needed_bytes - _held_bytes(url), 0) // len(SLOTS)) is not None
    return MemoryFacts(
        directory=str(_SHARED_MEMORY),
        there=True,
        free_bytes=status.f_bavail * status.f_frsize,
        total_bytes=status.f_blocks * status.f_frsize,
        needed_bytes=needed_bytes,
        fits=fits,
    )


def _held_bytes(url: str) -> int:
    """Return the bytes of the run's own snapshots on this host; new snapshots will replace them."""
    held_bytes = 0
    for lock in (_SHARED_MEMORY / f"ckpt-tasks-{os.getuid()}").glob("*/lock"):
        if _holds(lock, os.fsencode(url)):
            held_bytes += sum(path.stat().st_size for path in lock.parent.glob("*/*") if path.is_file())
    return held_bytes


def _holds(path: Path, expected: bytes) -> bool:
    """Say whether a small file of this user holds these bytes; /dev/shm is shared, so nothing in it is trusted."""
    try:
        with open(path, "rb", opener=_open_regular) as file:
            return file.read(len(expected) + 1) == expected
    except OSError:
        return False


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        os.close(descriptor)
        raise OSError(f"{path} is not a file of this user")
    return descriptor


def _print(out: Output, checks: list[Check], wrong: int) -> None:
    from rich.text import Text

    made = table("check", "", "seen", "what to do")
    for check in checks:
        word = Text(check.verdict, style=_STYLES[check.verdict])
        made.add_row(check.name, word, printable(check.seen), printable(check.do))
    out.print(made)
    warnings = sum(check.verdict == "warning" for check in checks)
    if wrong:
        out.print(Text.assemble((f"Wrong: {wrong}", "bold red"), f", warnings: {warnings}."))
    else:
        out.print(Text.assemble(("Nothing is wrong", "bold green"), f", warnings: {warnings}."))
