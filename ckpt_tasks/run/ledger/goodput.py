"""How a run spent its time: the training that led to its result, and the rest by cause.

Goodput is useful time / wall time, as Google's ML Goodput defines it (cloud.google.com, "Goodput metric as measure of
ML productivity", 2024; github.com/AI-Hypercomputer/ml-goodput-measurement), measured from the ledger instead of from a
log of every step. Wall time runs from the first owner to the last entry of an owner. A commit counts at the time of its
snapshot (its entry's time less `flush_s`). The time between two such entries a and b is divided like this:

- useful: b is a commit of the final line: the time of its steps, as its process measured it (`trained_s`).
- lost: the same for a commit of an abandoned line; and the time of a failed attempt, from the entry before it.
- data: b is a commit: how long its steps waited for batches of a ResumableLoader (`data_s`).
- saving: b is a commit: how long training waited for its snapshot (`stall_s`).
- starting: b is the first commit of an owner or after a failure, and none of the above: start, restore, retry delay.
- down: b is an owner, and the owner before it had not released the run: the time since that owner's last entry.
- idle: b is an owner, and the run had been released.
- unattributed: b is a commit or a release, and none of the above.

The final line is the newest commit, its parent, and so on. The ledger does not say when a killed process died: its
training since its last entry counts as "down", not as "lost". Times are by the writers' clocks: a clock that was set
back hides time, and a clock that jumped ahead adds time. The ledger of a copied run has the times of the copy, not of
the training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.timeline import RESUMED, Moment, Timeline, read_timeline
from ckpt_tasks.storage.port import Store

SHARES = ("useful", "lost", "data", "saving", "starting", "down", "idle", "unattributed")
# The parts of the time until training runs again, in order; "noticed_s" lasts from the previous owner's last entry to
# the start of the process.
RETURNED = ("noticed_s", *RESUMED)
_OWNERS = ("taken", "lost")
_CLOCK = (*_OWNERS, "commit", "failure", "released")  # Only the owner at that time writes entries of these kinds.


@dataclass(frozen=True)
class Placed:
    """A moment, and its time in seconds since the first owner."""

    elapsed_s: float
    moment: Moment


@dataclass(frozen=True)
class TimeSpan:
    """A stretch of wall time, and the share to which it belongs: one of SHARES."""

    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Course:
    """A run laid out in time: its moments, the spans between them, and the final line.

    `line` holds the ledger numbers of the newest commit and of its ancestors.
    """

    placed: tuple[Placed, ...]
    spans: tuple[TimeSpan, ...]
    line: frozenset[int]
    wall_s: float

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The seconds of each share; together they are the wall time."""
        sums = dict.fromkeys(SHARES, 0.0)
        for span in self.spans:
            sums[span.kind] += span.end_s - span.begin_s
        return sums

    @property
    def goodput(self) -> float | None:
        """The useful share of the wall time; None if no time has passed."""
        return min(1.0, self.seconds["useful"] / self.wall_s) if self.wall_s > 0 else None

    @property
    def resumes(self) -> list[Placed]:
        """The moments at which the run got a new owner, after the first one."""
        return self.of(*_OWNERS)[1:]

    @property
    def returns(self) -> list[tuple[Moment, dict[str, float]]]:
        """The first commit after each restore, and the seconds before it, by the names in RETURNED."""
        returns: list[tuple[Moment, dict[str, float]]] = []
        before, gap_s = None, None
        for moment in (place.moment for place in self.of(*_CLOCK)):
            if moment.kind in _OWNERS:
                gap_s = max(0.0, moment.at_s - before.at_s) if before else None
            elif moment.resumed:
                parts = dict(moment.resumed)
                if gap_s is not None and "start_s" in parts:
                    parts["owner_s"] = min(parts.get("owner_s", 0.0), gap_s)
                    # A process may be older than the run's last owner, such as a notebook or a worker.
                    parts["start_s"] = min(parts["start_s"], gap_s - parts["owner_s"])
                    parts["noticed_s"] = round(gap_s - parts["owner_s"] - parts["start_s"], 6)
                returns.append((moment, parts))
            before = moment
        return returns

    @property
    def deaths(self) -> list[Placed]:
        """The owners that followed a dead owner, each placed at the dead owner's last entry."""
        ends = [(before, after.moment) for before, after in pairwise(self.of(*_CLOCK)) if after.moment.kind in _OWNERS]
        return [Placed(before.elapsed_s, owner) for before, owner in ends if before.moment.kind != "released"]

    @property
    def redone_steps(self) -> int:
        """The number of completed steps that training repeated after a restore."""
        return sum(last - first + 1 for first, last in self.redone.values())

    @cached_property
    def redone(self) -> dict[int, tuple[int, int]]:
        """The first and the last completed step that training repeated before a commit, by the commit's number.

        The ledger shows repeated steps before a commit, and repeated steps of an attempt that failed in a process that
        lived on. It shows the steps of a killed process after its last commit if the next process ran on its host.
        """
        steps: dict[str | None, int] = {None: 0}
        redone, reached = dict[int, tuple[int, int]](), 0
        for moment in (place.moment for place in self.of("commit", "failure")):
            step = moment.step or 0
            if moment.kind == "failure":
                reached = max(reached, step)
                continue
            steps[moment.identity] = step
            # Without `resumed`, training continued without a break or from a snapshot in memory: no step is repeated.
            if moment.resumed or moment.again:
                first, last = moment.again or (steps.get(moment.parent, reached) + 1, reached)
                if first <= last:
                    redone[moment.n] = first, last
                reached = step
            reached = max(reached, step)
        return redone

    def of(self, *whats: str) -> list[Placed]:
        """Return the moments of some kinds, oldest first."""
        return [place for place in self.placed if place.moment.kind in whats]


def follow(moments: Iterable[Moment]) -> Course:
    """Lay out a run's moments (oldest first) in time, and assign every span to a share."""
    known = list(moments)
    line = _final_line([moment for moment in known if moment.kind == "commit"])
    placed: list[Placed] = []
    spans: list[TimeSpan] = []
    before, now_s, elapsed_s = None, 0.0, 0.0
    for moment in known:
        if moment.kind not in _CLOCK:
            late_s = max(0.0, moment.at_s - now_s) if before else 0.0
            placed.append(Placed(elapsed_s + late_s, moment))
            continue
        at_s = moment.at_s - (moment.flush_s if moment.kind == "commit" else 0.0)  # A commit's snapshot was taken then.
        if before is not None and before.epoch == moment.epoch:
            at_s = max(at_s, now_s)
        gap_s = max(0.0, at_s - now_s) if before else 0.0
        if before is not None:
            spans += _laid(_cut(gap_s, before, moment, in_line=moment.n in line), elapsed_s, gap_s)
        before, now_s, elapsed_s = moment, at_s, elapsed_s + gap_s
        placed.append(Placed(elapsed_s, moment))
    return Course(placed=tuple(_within(placed, elapsed_s)), spans=tuple(spans), line=line, wall_s=elapsed_s)


class Followed:
    """The course of one run as read so far: `read` reads only new entries of the ledger.

    `runs` counts the runs seen: one more if the run was deleted and another one began in its directory.
    """

    def __init__(self, store: Store):
        self._store, self.runs = store, 1
        self.timeline, self.course = Timeline(), follow(())

    def read(self) -> Course:
        """Read new entries, and return the course up to now. Raises StoreError if the store fails."""
        history, known = History(self._store, whole=False), self.timeline
        if not known.stands_in(history):
            self.runs, known = self.runs + 1, Timeline()
        self.timeline = read_timeline(history, known=known)
        if self.timeline != known:
            self.course = follow(self.timeline.moments)
        return self.course


def _cut(gap_s: float, before: Moment, moment: Moment, *, in_line: bool) -> Mapping[str, float]:
    """Divide the time between two moments of owners into shares by kind, in the order of time.

    `in_line`: the moment is on the final line, so its steps are not lost.
    """
    if moment.kind in _OWNERS:
        return {"idle" if before.kind == "released" else "down": gap_s}
    if moment.kind == "failure":
        return {"lost": gap_s}
    if moment.kind == "released":
        return {"unattributed": gap_s}
    pieces, rest_s = dict[str, float](), gap_s
    measured = {"saving": moment.stall_s, "useful" if in_line else "lost": moment.trained_s, "data": moment.data_s}
    for kind, length_s in measured.items():
        pieces[kind] = min(rest_s, length_s)
        rest_s = max(0.0, rest_s - length_s)
    pieces["unattributed" if before.kind == "commit" else "starting"] = rest_s
    return dict(reversed(pieces.items()))


def _laid(pieces: Mapping[str, float], begin_s: float, gap_s: float) -> Iterator[TimeSpan]:
    """Yield the pieces as consecutive spans; the last one ends exactly at the end of the gap."""
    last, end_s = list(pieces)[-1], begin_s + gap_s
    for kind, length_s in pieces.items():
        until_s = end_s if kind == last else min(end_s, begin_s + length_s)
        if until_s > begin_s:
            yield TimeSpan(kind, begin_s, until_s)
        begin_s = until_s


def _within(placed: Iterable[Placed], wall_s: float) -> list[Placed]:
    """Move the times of other writers' entries between the owner's nearest moments, and into the wall time."""
    clamped: list[Placed] = []
    latest_s = wall_s
    for place in reversed(list(placed)):
        latest_s = min(latest_s, place.elapsed_s)
        clamped.append(Placed(latest_s, place.moment))
    return clamped[::-1]


def _final_line(commits: list[Moment]) -> frozenset[int]:
    """Return the newest commit and its ancestors; if a parent cannot be read, continue with the commit before."""
    known = {commit.identity: commit for commit in commits if commit.identity is not None}
    line: set[int] = set()
    at = commits[-1] if commits else None
    older = commits[:-1]
    while at is not None:
        line.add(at.n)
        while older and older[-1].n >= at.n:
            older.pop()
        if at.identity is not None and at.parent is None:
            break  # Training began with this commit.
        parent = known.get(at.parent) if at.parent is not None else None
        if parent is None or parent.n >= at.n:
            parent = older[-1] if older else None
        at = parent
    return frozenset(line)
