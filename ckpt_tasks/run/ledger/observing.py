"""Measurements of saves and failures in a run's own history, for the cadence.

They only decide how often to save, never which checkpoint to restore: events and times in the ledger are for people. A
wrong clock only makes an interval a little longer or shorter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import median

from ckpt_tasks.format.ledger import Entry
from ckpt_tasks.format.policy.cadence import FIRST_INTERVAL_S, AutoCadence, Observed, SavePoint, recommend
from ckpt_tasks.process import in_threads
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.timeline import Moment, moment

ENTRIES_READ = 256  # Read this many entries: those that retire checkpoints, half of them at most, tell nothing.
_AT_ONCE = 16  # A remote store gets at most this many requests at once.
_MEASURED = 32  # Costs are medians of this many commits: they follow a slower store soon, but not a single slow save.
_TOLD = ("commit", "failure", "lost", "taken")  # Entries of these kinds show costs and failures.


class LearningCadence:
    """The automatic cadence of one run: begins with the run's history, and learns from each commit.

    After a failure the first save comes as early as in a new run, if the flush and the overhead cap allow: whatever
    killed the last process may kill this one as soon, and then it would have trained for nothing.
    """

    def __init__(self, history: History):
        self._happened = recent(history)
        self._usual = self._cadence = AutoCadence()
        self._update()

    @property
    def interval_s(self) -> float:
        """The seconds from the last save, or from the start, to the next save."""
        return self._cadence.interval_s

    def due(self, last: SavePoint, now: SavePoint) -> bool:
        """Return True if a snapshot is due at `now`; `last` is the last save."""
        return self._cadence.due(last, now)

    def learn(self, entry: Entry) -> None:
        """Learn the cost of a save from a commit."""
        event = moment(entry)
        if event is not None:
            self._happened.append(event)
            self._update()

    def _update(self) -> None:
        observed = summarize(self._happened)
        if observed is None:
            return
        self._usual = self._cadence = self._usual.updated(observed)
        if next(event.kind for event in reversed(self._happened) if event.kind != "taken") != "commit":
            early_s = max(FIRST_INTERVAL_S, recommend(observed).least_s)
            self._cadence = replace(self._usual, interval_s=min(self._usual.interval_s, early_s))


def observe(history: History) -> Observed | None:
    """Return the measurements in a run's newest ledger entries; None before its first commit."""
    return summarize(recent(history))


def recent(history: History, most: int = ENTRIES_READ) -> deque[Moment]:
    """Read commits, failures and owners in the newest `most` ledger entries, oldest first; skip unreadable entries.

    A process that adds its own commits by `moment(entry)` has the same list as a new process would read.
    """
    next_n = history.head().next_n
    numbers = range(max(0, next_n - most), next_n)
    good = in_threads(history.good_entry, numbers, 1 if history.store.near else _AT_ONCE, "ckpt-ledger")
    moments = (moment(read[0]) for read in good if read is not None)
    return deque((known for known in moments if known is not None and known.kind in _TOLD), maxlen=most)


def summarize(events: Iterable[Moment]) -> Observed | None:
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


def _trained(events: list[Moment]) -> Iterator[tuple[float, Moment, Moment]]:
    """Yield (seconds, from, to) for each stretch of training that ended with a commit or a recorded failure.

    The ledger does not record the training between an owner's last commit and its death. So failures seem slightly more
    frequent than they are, and saves become slightly more frequent.
    """
    for before, after in pairwise(events):
        if after.epoch == before.epoch and after.kind in ("commit", "failure"):
            yield max(0.0, after.at_s - before.at_s), before, after


def _failures(events: list[Moment]) -> int:
    """Count the failures; a recorded failure that also ended its process counts once."""
    count, noted = 0, False
    for event in events:
        if event.kind == "failure" or (event.kind == "lost" and not noted):
            count += 1
        noted = event.kind == "failure"
    return count


def _steps_s(events: list[Moment]) -> Iterator[float]:
    """Yield an upper bound of the time of a step between successive commits; the bound includes other work."""
    for gap_s, before, after in _trained(events):
        steps = (after.step or 0) - (before.step or 0)
        if before.kind == after.kind == "commit" and steps > 0 and gap_s > 0:
            yield max(0.0, gap_s - after.stall_s) / steps
