"""What a run's own history says about saves and failures, for the cadence.

Only how often to save follows from it. What is restored never does: events and times in the ledger are for people, and
a clock that was wrong makes an interval a little longer or shorter here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from ckpt_tasks.errors import IntegrityError, ObjectNotFoundError
from ckpt_tasks.format.ledger import Entry
from ckpt_tasks.ledger.history import History
from ckpt_tasks.policy.cadence import AutoCadence, Observed, SavePoint
from ckpt_tasks.state.processes import in_threads

__all__ = ["ENTRIES_READ", "LearningCadence", "LedgerEvent", "ledger_event", "observe", "recent", "summarize"]

ENTRIES_READ = 256  # at most half of them retire; costs are measured of the newest 32 commits alone
_AT_ONCE = 16  # requests to a store that is far away
_MOST_S = 1e9  # thirty years
_MEASURED = 32  # the newest commits, of which costs are the median: a slower store shows soon, one slow save does not
# How ownership.py says that the owner before was lost. One that released the directory had committed before.
_LOST = ("is gone", "has shown no life", "has been started anew", "has not released it within its grace")


@dataclass(frozen=True, kw_only=True)
class LedgerEvent:
    """What one ledger entry says about cost and failure.

    `what` is "commit"; "failure", an attempt that failed in a process that lived on; "lost", an owner that came after
    one that died; or "taken", any other new owner. `at_s` is in seconds since 1970 by the writer's clock. The other
    seconds are a commit's: how long training waited, how long it took from the snapshot to the commit, and how long a
    step took (None: it does not say).
    """

    kind: str
    epoch: int
    at_s: float
    step: int = 0
    stall_s: float = 0.0
    flush_s: float = 0.0
    step_s: float | None = None


class LearningCadence:
    """The automatic cadence of one run: begun with what its history says, changed by each commit."""

    def __init__(self, history: History):
        self._happened = recent(history)
        self._cadence = AutoCadence()
        self._update()

    @property
    def interval_s(self) -> float:
        """The seconds between saves."""
        return self._cadence.interval_s

    def due(self, last: SavePoint, now: SavePoint) -> bool:
        """Say whether a snapshot is due."""
        return self._cadence.due(last, now)

    def learn(self, entry: Entry) -> None:
        """Take a commit's costs into account."""
        one = ledger_event(entry)
        if one is not None:
            self._happened.append(one)
            self._update()

    def _update(self) -> None:
        observed = summarize(self._happened)
        if observed is not None:
            self._cadence = self._cadence.updated(observed)


def observe(history: History) -> Observed | None:
    """Read what a run has measured of itself out of its newest ledger entries; None before its first commit."""
    return summarize(recent(history))


def recent(history: History, most: int = ENTRIES_READ) -> deque[LedgerEvent]:
    """Read what the newest `most` ledger entries say, oldest first; entries that cannot be read are left out.

    A process that goes on appending what it commits itself, `ledger_event(entry)`, knows what the next one will find:
    the oldest make room.
    """
    next_n = history.head().next_n
    numbers = range(max(0, next_n - most), next_n)
    if history.store.near:
        read = [*map(partial(_read, history), numbers)]
    else:
        read = in_threads(partial(_read, history), numbers, _AT_ONCE, "ckpt-ledger")
    return deque((one for one in read if one is not None), maxlen=most)


def _read(history: History, n: int) -> LedgerEvent | None:
    try:
        entry, _ = history.read_entry(n)
    except (IntegrityError, ObjectNotFoundError):
        return None  # a damaged entry is `verify`'s to report
    return ledger_event(entry)


def ledger_event(entry: Entry) -> LedgerEvent | None:
    """Return what an entry says about cost and failure; None if it says nothing."""
    event, owner = entry.event, entry.state.owner
    epoch = owner.epoch if owner else entry.epoch  # an owner's own entry still carries the epoch before it
    try:
        at_s = datetime.fromisoformat(entry.at).timestamp()
    except (ValueError, OverflowError):
        return None  # what has no time says nothing about how long anything took
    if event["kind"] == "commit":
        return _commit(entry, epoch, at_s)
    if event["kind"] == "owner":
        lost = any(words in str(event.get("because")) for words in _LOST)
        return LedgerEvent(kind="lost" if lost else "taken", epoch=epoch, at_s=at_s)
    if event["kind"] == "note" and event.get("note") == "failure":
        return LedgerEvent(kind="failure", epoch=epoch, at_s=at_s)
    return None


def summarize(events: Iterable[LedgerEvent]) -> Observed | None:
    """Turn what happened, oldest first, into what the cadence decides from; None before the first commit."""
    known = list(events)
    commits = [one for one in known if one.kind == "commit"][-_MEASURED:]
    if not commits:
        return None
    steps_s = [one.step_s for one in commits if one.step_s is not None] or [*_steps_s(known)][-_MEASURED:]
    return Observed(
        step_s=median(steps_s) if steps_s else None,
        stall_s=median(one.stall_s for one in commits),
        flush_s=median(one.flush_s for one in commits),
        failures=_failures(known),
        trained_s=sum(gap_s for gap_s, _, _ in _trained(known)),
    )


def _commit(entry: Entry, epoch: int, at_s: float) -> LedgerEvent:
    made = next((c for c in reversed(entry.state.live) if c.n == entry.n), None)
    cost_s = made.cost_s if made else 0.0  # all that older entries say: a synchronous save waits for its flush
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
    """Yield (seconds, from, to) of training that a commit or a noted failure ended.

    What was trained between the last commit of an owner and its death is in no entry. Leaving it out makes failures
    look a little more frequent than they are, and saves with them.
    """
    for before, after in pairwise(events):
        if after.epoch == before.epoch and after.kind in ("commit", "failure"):
            yield max(0.0, after.at_s - before.at_s), before, after


def _failures(events: list[LedgerEvent]) -> int:
    """Count the failures; one that was noted and then ended its process as well counts once."""
    count, noted = 0, False
    for one in events:
        if one.kind == "failure" or (one.kind == "lost" and not noted):
            count += 1
        noted = one.kind == "failure"
    return count


def _steps_s(events: list[LedgerEvent]) -> Iterator[float]:
    """Yield how long a step took at most, from commit to commit: whatever else was done meanwhile is in it."""
    for gap_s, before, after in _trained(events):
        if before.kind == after.kind == "commit" and after.step > before.step and gap_s > 0:
            yield max(0.0, gap_s - after.stall_s) / (after.step - before.step)


def _seconds(event: Mapping[str, Any], name: str) -> float | None:
    value = event.get(name)
    if not isinstance(value, int | float) or not 0 <= value <= _MOST_S:
        return None  # what a number that JSON lacks was written as is not a number either
    return round(float(value), 6)  # as it is written; what is smaller would make rates without end
