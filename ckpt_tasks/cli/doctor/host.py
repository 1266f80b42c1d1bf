"""Check the store of a run directory, its disk and its clock, and this host's memory, without changing a run."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_tasks.checkpoint.memory.cache import snapshots_left
from ckpt_tasks.checkpoint.memory.memory import SLOTS
from ckpt_tasks.checkpoint.memory.memory_room import SHARED_MEMORY, default_directory
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.checkpoint.restore.run_forecast import forecast_run
from ckpt_tasks.cli.doctor.checks import Check, judge_clock, judge_disk, judge_last, judge_memory
from ckpt_tasks.cli.doctor.findings import judge
from ckpt_tasks.cli.doctor.measuring import try_store
from ckpt_tasks.errors import CkptError, ObjectNotFoundError
from ckpt_tasks.format.keys import FORMAT_NAME
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.policy.space import Forecast
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.report.words import size
from ckpt_tasks.storage.locations import Location, free_bytes
from ckpt_tasks.storage.port import Store
from ckpt_tasks.storage.retrying import RetryingStore

_DEADLINE_S = 5.0
# An object of this size shows whether the store works; `ckpt doctor-store` measures speed.
_SMALL_BYTES = 1 << 16
# Every owner writes into these directories, and creates new ones.
_WRITTEN = ("ledger", "heartbeat")


def check_place(directory: str | None) -> list[Check]:
    """Check the store of a run directory, existing or new, and the memory of this host."""
    left = [judge_snapshots(found)] if (found := snapshots_left(SHARED_MEMORY)) else []
    if directory is None:
        return [Check("store", "not checked", "no DIR was named"), _memory(None, None), *left]
    try:
        store = Location(directory).open()
        inner = store.inner if isinstance(store, RetryingStore) else store
        seen, run = _store(inner, RetryingStore(inner, deadline_s=_DEADLINE_S))
        newest = next(iter(run.checkpoints()), None) if run is not None else None
        state = run.head().state if run is not None else State()
        disk = [*_disk(inner, run)]
    except CkptError as error:
        return [Check("store", "wrong", error.message, error.hint or ""), _memory(None, None), *left]
    results = [
        judge_last("restore drill", state.checks_of("drill"), "ckpt restore-drill"),
        judge_last("verification", state.checks_of("verify"), "ckpt verify"),
    ]
    memory = _memory(inner.url, newest.size_bytes if newest else None)
    return [seen, *(results if newest else ()), *disk, *_clock(inner.endpoint), memory, *left]


def _store(store: Store, patient: Store) -> tuple[Check, Run | None]:
    """Check the run in the store, or probe the store if it has no run; also return the run."""
    try:
        data = patient.get(FORMAT_NAME, 1 << 20)
    except ObjectNotFoundError:
        verdict = judge(try_store(store, large_bytes=_SMALL_BYTES))
        seen = f"{store.url}: no run yet; {verdict.words}"
        wrong = Check("store", "wrong", seen, "ckpt doctor-store says more.")
        return Check("store", "ok", seen) if verdict.fit else wrong, None
    history = History(patient)
    key = history.check(None)
    if key is None:
        return Check("store", "wrong", f"{store.url}: format.json is damaged", "ckpt verify says what else is."), None
    return _proved(store, f"{store.url} holds the run {key!r}", json.loads(data)), Run(history, key)


def _proved(store: Store, seen: str, written: dict[str, Any]) -> Check:
    proved = written.get("proved")
    if store.endpoint is None:
        return Check("store", "ok", f"{seen}; of two writers one loses (link)")
    if written.get("single_writer"):
        do = "See to it that one process at a time writes, or use a store with conditional puts."
        return Check("store", "warning", f"{seen}; nothing but you keeps a second writer out (single_writer)", do)
    if written.get("endpoint") != store.endpoint:
        return Check("store", "ok", f"{seen}; {store.endpoint} is tried when the next process takes it")
    if not isinstance(proved, dict) or proved.get("put_if_absent") is not True:
        return Check(
            "store", "warning", f"{seen}; conditional writes have not been proved", f"ckpt doctor-store {store.url}"
        )
    return Check("store", "ok", f"{seen}; conditional writes were proved when it was made")


def _disk(store: Store, run: Run | None) -> Iterator[Check]:
    """Check, without writing, that a local run can be written; without a run, `_store` has tested this already."""
    if store.endpoint is not None or not (Path(store.url) / "ledger").is_dir():
        return
    paths = [path for path in (Path(store.url), *map(Path(store.url).joinpath, _WRITTEN)) if path.is_dir()]
    unwritable = [str(path) for path in paths if not os.access(path, os.W_OK | os.X_OK, effective_ids=True)]
    free = free_bytes(store) or 0
    forecast: Forecast | None = None if run is None else forecast_run(run, free)
    yield judge_disk(next(iter(unwritable), None), free, forecast)


def _clock(endpoint: str | None) -> Iterator[Check]:
    if endpoint is not None and "://" in endpoint:
        # The import takes seconds, and Prefect's settings may be unreadable.
        from ckpt_tasks.cli.doctor.server_checks import clock_of

        yield judge_clock("store's clock", *clock_of(endpoint), "the store")


def _memory(url: str | None, size_bytes: int | None) -> Check:
    """Check the memory for snapshots of a run whose newest checkpoint has this size; None: no checkpoint."""
    if not SHARED_MEMORY.is_dir():
        return judge_memory(str(SHARED_MEMORY), None, None, None)
    status = os.statvfs(SHARED_MEMORY)
    room = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    if size_bytes is None or url is None:
        return judge_memory(str(SHARED_MEMORY), room, None, None)
    needed_bytes = size_bytes * len(SLOTS)
    fits = default_directory(max(needed_bytes - _held_bytes(url), 0) // len(SLOTS)) is not None
    return judge_memory(str(SHARED_MEMORY), room, needed_bytes, fits)


def judge_snapshots(left: Mapping[str, tuple[int, bool]]) -> Check:
    """List the snapshots in memory that no process holds; those of runs that are gone take up room for nothing."""
    gone = any(is_gone for _, is_gone in left.values())
    seen = [f"{url}: {size(held)}{', a run that is gone' * is_gone}" for url, (held, is_gone) in left.items()]
    do = "Free those of runs that are gone: ckpt prune --memory" if gone else ""
    return Check("snapshots", "warning" if gone else "ok", "; ".join(seen), do)


def _held_bytes(url: str) -> int:
    """Return the size of the run's own snapshots on this host, which new snapshots will replace."""
    held_bytes = 0
    for lock in (SHARED_MEMORY / f"ckpt-tasks-{os.getuid()}").glob("*/lock"):
        if holds(lock, os.fsencode(url)):
            held_bytes += sum(path.stat().st_size for path in lock.parent.glob("*/*") if path.is_file())
    return held_bytes


def holds(path: Path, expected: bytes) -> bool:
    """Return True if a file of this user begins with exactly these bytes, as a text that zeros may follow.

    Other users' files in /dev/shm are not trusted.
    """
    try:
        with open(path, "rb", opener=_open_regular) as file:
            return file.read(len(expected) + 1).rstrip(b"\0") == expected
    except OSError:
        return False


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        os.close(descriptor)
        raise OSError(f"{path} is not a file of this user")
    return descriptor
