"""What a run's own history says about saves and failures, for the cadence.

It only decides how often to save, never what is restored: events and times in the ledger are for people. A wrong clock
makes an interval a little longer or shorter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from ckpt_tasks.format.ledger import Entry
from ckpt_tasks.format.parsing import seconds_of
from ckpt_tasks.ledger.history import History
from ckpt_tasks.policy.cadence import AutoCadence, Observed, SavePoint
from ckpt_tasks.process.processes import in_threads

__all__ = ["ENTRIES_READ", "LearningCadence", "LedgerEvent", "ledger_event", "observe", "recent", "summarize"]

ENTRIES_READ = 256  # at most half of them retire; costs come from the newest 32 commits only
_AT_ONCE = 16  # parallel requests to a remote store
_MOST_S = 1e9  # thirty years
_MEASURED = 32  # costs are medians of this many commits: a slower store shows soon, one slow save does not
# The words of ownership.py for a lost owner. One that released the directory had committed before.
_LOST = ("is gone", "has shown no life", "has been started anew", "has not released it within its grace")


@dataclass(frozen=True, kw_only=True)
class LedgerEvent:
    """What one ledger entry says about cost and failure.

    `kind` is "commit"; "failure", an attempt that failed in a process that lived on; "lost", an owner that followed a
    dead one; or "taken", any other new owner. `at_s` is in seconds since 1970 by the writer's clock. The other seconds
    are a commit's: how long training waited, the time from snapshot to commit, and the time of a step (None: unknown).
    """

    kind: str
    epoch: int
    at_s: float
    step: int = 0
    stall_s: float = 0.0
    flush_s: float = 0.0
    step_s: float | None = None


class LearningCadence:
    """The automatic cadence of one run: it starts from the run's history, and learns from each commit."""

    def __init__(self, history: History):
        self._happened = recent(history)
        self._cadence = AutoCadence()
        self._update()

    @property
    def interval_s(self) -> float:
        """The seconds between saves."""
        return self._cadence.interval_s

    def due(self, last: SavePoint, now: SavePoint) -> bool:
        """Say whether a snapshot is due at `now`; `last` is the last save."""
        return self._cadence.due(last, now)

    def learn(self, entry: Entry) -> None:
        """Learn from a commit what a save costs."""
        event = ledger_event(entry)
        if event is not None:
            self._happened.append(event)
            self._update()

    def _update(self) -> None:
        observed = summarize(self._happened)
        if observed is not None:
            self._cadence = self._cadence.updated(observed)


def observe(history: History) -> Observed | None:
    """Return the measurements in a run's newest ledger entries; None before its first commit."""
    return summarize(recent(history))


def recent(history: History, most: int = ENTRIES_READ) -> deque[LedgerEvent]:
    """Read the events of the newest `most` ledger entries, oldest first; leave out unreadable entries.

    A process can append its own commits, as `ledger_event(entry)`, and then has what a new process would read.
    """
    next_n = history.head().next_n
    numbers = range(max(0, next_n - most), next_n)
    if history.store.near:
        good = [*map(history.good_entry, numbers)]
    else:
        good = in_threads(history.good_entry, numbers, _AT_ONCE, "ckpt-ledger")
    events = (ledger_event(read[0]) for read in good if read is not None)
    return deque((event for event in events if event is not None), maxlen=most)


def ledger_event(entry: Entry) -> LedgerEvent | None:
    """Return what an entry says about cost and failure; None if it says nothing."""
    event, owner = entry.event, entry.state.owner
    epoch = owner.epoch if owner else entry.epoch  # a new owner's own entry still has the previous epoch
    at_s = seconds_of(entry.at)
    if at_s is None:
        return None  # without a time it does not say how long anything took
    if event["kind"] == "commit":
        return _commit(entry, epoch, at_s)
    if event["kind"] == "owner":
        lost = any(words in str(event.get("because")) for words in _LOST)
        return LedgerEvent(kind="lost" if lost else "taken", epoch=epoch, at_s=at_s)
    if event["kind"] == "note" and event.get("note") == "failure":
        return LedgerEvent(kind="failure", epoch=epoch, at_s=at_s)
    return None


def summarize(events: Iterable[LedgerEvent]) -> Observed | None:
    """Summarise events, oldest first, for the cadence; return None if there is no commit."""
    known = list(events)
    commits = [event for event in known if event.kind == "commit"][-_MEASURED:]
    if not commits:
        return None
    steps_s = [event.step_s for event in commits if event.step_s is not None] or [*_steps_s(known)][-_MEASURED:]
    return Observed(
        step_s=median(steps_s) if steps_s else None,
        stall_s=median(event.stall_s for event in commits),
        flush_s=median(event.flush_s for event in commits),
        failures=_failures(known),
        trained_s=sum(gap_s for gap_s, _, _ in _trained(known)),
    )


def _commit(entry: Entry, epoch: int, at_s: float) -> LedgerEvent:
    made = next((c for c in reversed(entry.state.live) if c.n == entry.n), None)
    cost_s = made.cost_s if made else 0.0  # all that old entries have: their synchronous saves waited for the flush
    stall_s, flush_s = _seconds(entry.event, "stall_s"), _seconds(entry.event, "flush_s")
    return LedgerEvent(
        kind="commit",
        epoch=epoch,
        at_s=at_s,
        step=made.step if made else 0,
        stall_s=cost_s if stall_s is None else stall_s,
        flush_s=cost_s if flush_s is None else flush_s,
        step_s=_seconds(entry.event, "step_s"),
    )


def _trained(events: list[LedgerEvent]) -> Iterator[tuple[float, LedgerEvent, LedgerEvent]]:
    """Yield (seconds, from, to) of each stretch of training that ended with a commit or a recorded failure.

    No entry has the training between an owner's last commit and its death. Without it failures look a little more
    frequent than they are, so saves become a little more frequent, too.
    """
    for before, after in pairwise(events):
        if after.epoch == before.epoch and after.kind in ("commit", "failure"):
            yield max(0.0, after.at_s - before.at_s), before, after


def _failures(events: list[LedgerEvent]) -> int:
    """Count the failures; one that was recorded and then ended its process counts once."""
    count, noted = 0, False
    for event in events:
        if event.kind == "failure" or (event.kind == "lost" and not noted):
            count += 1
        noted = event.kind == "failure"
    return count


def _steps_s(events: list[LedgerEvent]) -> Iterator[float]:
    """Yield an upper bound of the time of a step, from commit to commit: other work is included."""
    for gap_s, before, after in _trained(events):
        if before.kind == after.kind == "commit" and after.step > before.step and gap_s > 0:
            yield max(0.0, gap_s - after.stall_s) / (after.step - before.step)


def _seconds(event: Mapping[str, Any], name: str) -> float | None:
    value = event.get(name)
    if not isinstance(value, int | float) or not 0 <= value <= _MOST_S:
        return None  # NaN and infinity are written as strings
    return round(float(value), 6)  # smaller numbers would make infinite rates
