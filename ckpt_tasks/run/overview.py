"""Many runs side by side: a summary of each from its newest ledger entry alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ckpt_tasks.errors import CheckpointNotFoundError, CkptError, IntegrityError, StoreError
from ckpt_tasks.format.keys import FORMAT_NAME, LEDGER_PREFIX
from ckpt_tasks.format.ledger import State, lineage
from ckpt_tasks.format.records import Evaluation
from ckpt_tasks.process import in_threads
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import Head, History
from ckpt_tasks.run.ledger.live_steps import read_live_steps
from ckpt_tasks.run.ledger.ownership import Signs, identify, why_free
from ckpt_tasks.storage.locations import stores_below
from ckpt_tasks.storage.port import Store

_THREADS = 16
_TIMEOUT_S = CheckpointConfig.owner_timeout_s  # The default is used: the ledger does not have a run's own timeout.


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run: its newest checkpoint, the number of its checkpoints, and whether it is training now.

    `state` is running (its owner lives), ended (its owner has released it), stopped (the same, after a signal), silent
    (its owner is gone without a release), new (nothing is saved yet), damaged or unreadable; `why` explains the last
    five. `size_bytes` is the sum over live checkpoints: an object that several checkpoints use counts several times.
    `metrics`: the metrics of the newest checkpoint, and the newest results of each evaluation suite, as "suite/metric".
    `live_step` is the newest step that a running owner has trained and not committed, and `live` has its metrics.
    """

    name: str
    url: str
    state: str
    why: str = ""
    run_key: str | None = None
    step: int | None = None
    saved_at: str | None = None
    checkpoints: int = 0
    pinned: int = 0
    size_bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    live_step: int | None = None
    live: Mapping[str, float] = field(default_factory=dict)


def summaries_below(store: Store) -> list[RunSummary]:
    """Summarise every run directly below this directory, by name; a damaged run is listed, not raised.

    Raises StoreError if the directory itself cannot be listed.
    """
    return [look.summary for look in looks_at(stores_below(store)).values()]


def places_of(root: Store) -> dict[str, Store]:
    """Return the directories that may be runs, by name: `root` itself if it is one, else those directly below it.

    Raises StoreError if `root` cannot be listed.
    """
    is_run = bool(root.names(LEDGER_PREFIX, limit=1))
    return {root.url.rstrip("/").rpartition("/")[2]: root} if is_run else stores_below(root)


class Look(NamedTuple):
    """A run's summary, its newest state and the number of its newest entry; the state is empty if it cannot be read.

    `partial`: only the newest of many checkpoints were read, so `checkpoints` and `size_bytes` do not count the others.
    """

    summary: RunSummary
    state: State
    partial: bool = False
    n: int = -1


def looks_at(places: Mapping[str, Store]) -> dict[str, Look]:
    """Summarise the runs among these directories, by name, each with its newest state."""
    looks = in_threads(lambda place: look_at(*place), places.items(), _THREADS, "ckpt-overview")
    return {name: look for name, look in zip(places, looks, strict=True) if look is not None}


def look_at(name: str, store: Store, *, whole: bool = True) -> Look | None:
    """Summarise one directory; return None if it is not a run. If not `whole`, a long run is `partial`."""
    history = History(store, whole=whole)
    say = partial(RunSummary, name=name, url=store.url)
    try:
        run_key, missing = _run_key(history)
        if missing and not store.names(LEDGER_PREFIX, limit=1):
            return None
        head = history.head()
        state, why = ("damaged", _damage(head)) if head.damaged else life_of(history, head.state)
        if run_key is None:
            state, why = "damaged", f"{FORMAT_NAME} is {'missing' if missing else 'damaged'}"
    except IntegrityError as error:
        return Look(say(state="damaged", why=str(error)), State())
    except CkptError as error:
        return Look(say(state="unreadable", why=str(error)), State())
    is_partial = head.entry is not None and head.entry.partial
    newest_first = lineage(head.state.live)
    newest = newest_first[0] if newest_first else None
    if is_partial and (newest is None or newest.abandoned):
        return look_at(name, store)  # The newest checkpoint was not read.
    summary = say(
        state=state,
        why=why,
        run_key=run_key,
        step=newest.step if newest else None,
        saved_at=newest.saved_at if newest else None,
        checkpoints=len(newest_first),
        pinned=len(head.state.pins),
        size_bytes=sum(checkpoint.size_bytes for checkpoint in newest_first),
        metrics={**(newest.metrics if newest else {}), **_evaluated(head.state)},
        **live_facts(store, head.state, state, newest.step if newest else None),
    )
    return Look(summary, head.state, is_partial, head.next_n - 1)


def _run_key(history: History) -> tuple[str | None, bool]:
    """Return the run's key (None: format.json is damaged or missing), and whether format.json is missing."""
    try:
        return history.check(None), False
    except CheckpointNotFoundError:
        return None, True


def _damage(head: Head) -> str:
    entries = "1 ledger entry" if len(head.damaged) == 1 else f"{len(head.damaged)} ledger entries"
    return f"{entries} cannot be read"


def life_of(history: History, state: State) -> tuple[str, str]:
    """Return the state of an undamaged run, as in RunSummary, and why; reads its owner's heartbeat."""
    owner = state.owner
    if owner is None or owner.released:
        if not state.live:
            return "new", "nothing is saved yet"
        if lineage(state.live)[0].why == "signal":
            return "stopped", "by a signal; the next start resumes it"
        return "ended", ""
    free = why_free(owner, identify(None), Signs(history, _TIMEOUT_S).silent_s(owner), _TIMEOUT_S)
    return ("running", "") if free is None else ("silent", free)


def live_facts(store: Store, state: State, about: str, committed: int | None) -> dict[str, Any]:
    """Return what a summary says of the steps that a running owner has not committed; {} if nothing is known."""
    if about != "running":
        return {}
    try:
        steps = read_live_steps(store, state.owner, committed)
    except StoreError:
        return {}
    return {"live_step": steps[-1].step, "live": steps[-1].metrics} if steps else {}


def _evaluated(state: State) -> dict[str, float]:
    metrics: dict[str, float] = {}
    by_digest: dict[str, list[Evaluation]] = {}
    for evaluation in state.evaluations:
        by_digest.setdefault(evaluation.manifest_digest, []).append(evaluation)
    newest_first = [checkpoint.manifest_digest for checkpoint in lineage(state.live)]
    for digest in dict.fromkeys([*newest_first, *reversed(by_digest)]):  # A partial state lacks older checkpoints.
        for evaluation in by_digest.get(digest, ()):
            for name, value in evaluation.metrics.items():
                metrics.setdefault(f"{evaluation.suite}/{name}", value)
    return metrics
