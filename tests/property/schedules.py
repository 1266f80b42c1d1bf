"""One seed, one schedule: processes, threads, clocks, names and a store, all under one random generator.

The code under test runs as it is, in greenlets, and is preempted wherever it calls the store, sleeps or waits, and
nowhere else. Who goes on, who stops for a while or for ever, which request fails and how, and which one arrives late:
all of it is drawn from one generator, so that a seed is a schedule that can be had again, event by event.

How rough a schedule is, is drawn as well, from nothing at all to a failure in every third request (swarm testing:
Groce et al., ISSTA 2012): what needs two faults of one kind is found by the seeds in which these abound.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]

__all__ = ["Process", "Profile", "Schedule"]

_BEGIN_S = 1.7e9  # seconds since 1970; nothing follows from it
_NEVER_S = float("inf")
_TARDY = 0.2  # of the schedules
_PAUSES = (10, 40, 400)  # in steps: how long at most a process stops, and a request is late

# How a request may end, beside well. "refused": nothing was done. "unanswered": it was done, and the answer was lost.
# "exists": so it was, and the client's own second try was told so. "late": it arrives after the sender has given it up.
# "twice": it was done, and arrives once more. "torn": a part of the bytes was stored.
_READS = ("get", "read", "size", "names")
_CHANGES = {
    "put": ("refused", "unanswered", "late", "torn"),
    "put_if_absent": ("refused", "unanswered", "exists", "late", "twice", "torn"),
    "replace": ("refused", "unanswered", "late"),
    "delete": ("refused", "unanswered", "late"),
}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How rough a schedule is.

    `tick_s` is the mean time of a step. `fates` says in which ways a request of a kind may fail, if it concerns a name
    below `where`. The others are chances: that whoever ran goes on (`stick`); that a request which changes something
    finds its process stopped for a while (`stop`) or for ever (`die`); that it fails (`fault`); that one which only
    reads does (`blind`); and that after a failure the process' next requests fail as well (`storm`).
    `tardy`: requests fail in one way only, by arriving later than their sender believes.
    """

    tick_s: float
    stick: float
    stop: float = 0.0
    die: float = 0.0
    fault: float = 0.0
    blind: float = 0.0
    storm: float = 0.0
    where: str = ""
    fates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tardy: bool = False

    @classmethod
    def drawn(cls, rng: random.Random) -> Profile:
        """Draw how rough a schedule is."""
        every = sorted({fate for fates in _CHANGES.values() for fate in fates})
        allowed = rng.sample(every, rng.choice((1, 2, 3, len(every))))
        where = rng.choice(("", "ledger/", "checkpoint_"))
        fault = rng.choice((0.1, 0.3) if where else (0.0, 0.02, 0.1))
        drawn = cls(
            tick_s=rng.choice((0.02, 0.2, 1.0)),
            stick=rng.choice((0.0, 0.5, 0.9)),
            stop=rng.choice((0.0, 0.02, 0.1)),
            die=rng.choice((0.0, 0.002, 0.01)),
            fault=fault,
            blind=fault / 5,
            storm=rng.choice((0.0, 0.5, 1.0)),
            where=where,
            fates=_only(allowed),
        )
        if rng.random() >= _TARDY:
            return drawn
        # An entry arrives that its writer has given up, and could not look for: what comes of it takes more than one.
        # Its writer sees that nothing is there, so it may read even in a storm, and goes on from what it had before.
        fates = {"put": (), "put_if_absent": ("late",)}
        rough = {"fault": 0.3, "blind": 0.0, "storm": 1.0, "where": "ledger/", "fates": fates}
        return replace(drawn, stop=0.0, die=0.0, tardy=True, **rough)  # type: ignore[arg-type]

    def calm(self) -> Profile:
        """Return the same clock without anything that goes wrong."""
        return Profile(tick_s=self.tick_s, stick=0.5)


def _only(allowed: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return how requests may fail, if changes fail in these ways."""
    changes = {what: tuple(fate for fate in fates if fate in allowed) for what, fates in _CHANGES.items()}
    return changes | dict.fromkeys(_READS, ("refused",))


@dataclass(eq=False, slots=True)
class Process:
    """What stops and dies as a whole: a program and the threads that it has started."""

    name: str
    gone: bool = False  # it has ended, or died
    stopped_until_s: float = 0.0
    storm: int = 0  # so many of its next requests fail
    failure: BaseException | None = None


@dataclass(eq=False, slots=True)
class _Task:
    process: Process
    run: Any  # a greenlet
    until: Callable[[], bool] | None = None
    deadline_s: float = 0.0


class Schedule:
    """The processes of one seed, their clock, and who runs when."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.profile = Profile.drawn(self.rng)
        self.now_s = _BEGIN_S
        self.trace: list[tuple[float, str, str, str, str]] = []
        self._hub = getcurrent()
        self._tasks: list[_Task] = []
        self._left: list[_Task] = []  # of processes that are gone
        self._current: _Task | None = None
        self._arrivals: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._over = False

    # ── for who sets it up ───────────────────────────────────────────────────────────────────────────────────

    def start(self, name: str, program: Callable[[Process], None]) -> Process:
        """Add a process; it begins to run in `run`, and ends when its program returns."""
        process = Process(name)

        def life() -> None:
            program(process)
            process.gone = True

        self._spawn(process, life)
        return process

    def run(self, good: Callable[[], bool]) -> None:
        """Let the processes run until all are gone, or `good` says no; raise what one of them raised."""
        while good() and self._tasks:
            self._deliver(self.now_s)
            task = self._choose()
            if task is None:
                self._wait_for_something()
                continue
            self.now_s += self.rng.random() * 2 * self.profile.tick_s
            self._current = task
            task.run.switch()
            process = task.process
            if process.failure is not None:
                raise process.failure
            if process.gone:  # and its threads with it
                self._left += [one for one in self._tasks if one.process is process]
                self._tasks = [one for one in self._tasks if one.process is not process]
            elif task.run.dead:
                self._tasks.remove(task)
        self._current = None

    def settle(self) -> None:
        """Let every late request arrive, and nothing go wrong from now on; who has not ended by now never goes on."""
        self.end()
        self._deliver(_NEVER_S)
        self.profile, self._over = self.profile.calm(), False

    def end(self) -> None:
        """Take every process that is left off the schedule; none of its requests reaches the store any more."""
        self._over = True
        tasks, self._tasks, self._left = self._tasks + self._left, [], []
        for task in tasks:
            if task.run:  # has begun, and has not ended
                task.run.throw(GreenletExit)

    # ── for who runs on it ───────────────────────────────────────────────────────────────────────────────────

    @property
    def process(self) -> Process:
        """The process that runs."""
        return self._running().process

    def request(self, what: str, name: str) -> str:
        """Let others run before a request, then say how it ends: "done", or one of its fates."""
        process, profile, rng = self.process, self.profile, self.rng
        if what in _CHANGES:
            if rng.random() < profile.stop:
                process.stopped_until_s = self.now_s + profile.tick_s * rng.choice(_PAUSES) * rng.random()
            if rng.random() < profile.die:
                process.gone = True
        self._yield()
        fate = self._fate(process, what, name)
        self.trace.append((self.now_s - _BEGIN_S, process.name, what, name, fate))
        return fate

    def later(self, effect: Callable[[], None]) -> None:
        """Have something happen some time from now, whatever becomes of its process."""
        pause = _PAUSES[-1] if self.profile.tardy else self.rng.choice(_PAUSES)  # its sender gives it up before
        delay_s = self.profile.tick_s * pause * self.rng.random()
        heapq.heappush(self._arrivals, (self.now_s + delay_s, next(self._numbers), effect))

    def wait(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Let others run until something holds, or the time is over; return whether it holds."""
        task = self._running()
        if until():
            return True
        task.until, task.deadline_s = until, _NEVER_S if timeout_s is None else self.now_s + timeout_s
        self._yield()
        task.until = None
        return until()

    def sleep(self, seconds: float) -> None:
        """Let others run for some seconds."""
        self.wait(lambda: False, seconds)

    def spawn(self, target: Callable[[], None]) -> None:
        """Start a thread of the process that runs."""
        self._spawn(self.process, target)

    # ── private helpers ──────────────────────────────────────────────────────────────────────────────────────

    def _spawn(self, process: Process, target: Callable[[], None]) -> None:
        def life() -> None:
            try:
                target()
            except GreenletExit:
                return
            except BaseException as error:  # noqa: BLE001 (`run` raises it)
                process.failure = error

        self._tasks.append(_Task(process, greenlet(life, self._hub)))

    def _running(self) -> _Task:
        if self._over or self._current is None:
            raise GreenletExit  # the code that a process runs while it is taken off the schedule
        return self._current

    def _yield(self) -> None:
        if not self._over:
            self._hub.switch()
        if self._over:
            raise GreenletExit

    def _choose(self) -> _Task | None:
        now_s, ready = self.now_s, []
        for task in self._tasks:
            if task.process.stopped_until_s > now_s:
                continue
            if task.until is None or now_s >= task.deadline_s or task.until():
                ready.append(task)
        if not ready:
            return None
        if self._current in ready and self.rng.random() < self.profile.stick:
            return self._current
        return ready[int(self.rng.random() * len(ready))]

    def _wait_for_something(self) -> None:
        # Who is stopped, and waits as well, may be ready as soon as the first of both is over.
        times = [task.process.stopped_until_s for task in self._tasks]
        times += [task.deadline_s for task in self._tasks if task.until]
        times += [at_s for at_s, _, _ in self._arrivals[:1]]
        self.now_s = min((at_s for at_s in times if self.now_s < at_s < _NEVER_S), default=_NEVER_S)
        if self.now_s == _NEVER_S:
            raise RuntimeError(f"nobody can continue: {[task.process.name for task in self._tasks]}")

    def _deliver(self, until_s: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= until_s:
            heapq.heappop(self._arrivals)[2]()

    def _fate(self, process: Process, what: str, name: str) -> str:
        profile, rng = self.profile, self.rng
        ways = profile.fates.get(what)
        if not ways:  # neither does it end a storm
            return "done"
        if process.storm:
            process.storm -= 1
            failed = rng.random() < 0.9
        else:
            chance = profile.fault if what in _CHANGES else profile.blind
            failed = rng.random() < chance and name.startswith(profile.where)
            if failed and rng.random() < profile.storm:
                process.storm = 8 if profile.tardy else rng.choice((1, 1, 2, 8))
        return rng.choice(ways) if failed else "done"
