"""Metrics of runs for Prometheus, read only from their ledgers: this module asks no process, and writes nothing."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from ckpt_tasks.errors import CheckpointNotFoundError, CkptError
from ckpt_tasks.format.parsing import seconds_of
from ckpt_tasks.format.records import RunCheck
from ckpt_tasks.run.ledger.goodput import SHARES, Course, Followed, follow
from ckpt_tasks.run.ledger.timeline import Moment
from ckpt_tasks.run.overview import Look, looks_at, places_of
from ckpt_tasks.storage.port import Store

_Sample = tuple[Mapping[str, str], float]
_Samples = Mapping[str, Sequence[_Sample]]
_Values = Callable[[Look, Course], Iterable[_Sample]]


def registry_of(store: Store) -> CollectorRegistry:
    """Return a registry that reads the run in a directory, or the runs directly below it, at each scrape.

    Raises CheckpointNotFoundError if there is no run now.
    """
    places: dict[str, Store] = {}
    followed: dict[str, Followed] = {}

    def looks() -> Mapping[str, Look]:
        places.update(now := places_of(store))
        return looks_at(now)

    def course(name: str, look: Look) -> Course:
        run = followed.setdefault(name, Followed(places[name]))
        if look.summary.state != "running":
            del followed[name]
        return run.read()

    if not looks():
        raise CheckpointNotFoundError(f"there is no run in {store.url}, nor directly below it")
    registry = CollectorRegistry()
    registry.register(Runs(looks, course, reads=True))
    return registry


class Runs:
    """A collector of prometheus_client over runs: `looks` returns the newest summaries, `course` reads a run's course.

    The samples of a course are kept until the run's ledger grows. With `reads`, `collect` first reads changed courses;
    otherwise it uses only the newest summaries and the samples from earlier calls of `read`.
    """

    def __init__(
        self, looks: Callable[[], Mapping[str, Look]], course: Callable[[str, Look], Course], *, reads: bool = False
    ):
        self._looks, self._course, self._reads = looks, course, reads
        self._known: dict[str, tuple[object, _Samples]] = {}
        self._reading = threading.Lock()

    def read(self, looks: Mapping[str, Look], most_s: float = math.inf) -> None:
        """Read the changed courses, those of running runs first; after `most_s` seconds, begin no further course."""
        until_s = time.monotonic() + most_s
        if not self._reading.acquire(timeout=-1 if math.isinf(most_s) else most_s):
            return
        try:
            self._known = {name: known for name, known in self._known.items() if name in looks}
            for name, look in sorted(looks.items(), key=lambda item: item[1].summary.state != "running"):
                if time.monotonic() >= until_s:
                    return
                sign = look.n, look.summary.saved_at
                if name in self._known and self._known[name][0] == sign:
                    continue
                with suppress(CkptError):  # The metric run_state shows the failure.
                    self._known[name] = sign, _measured(look, self._course(name, look), _OF_THE_LEDGER)
        finally:
            self._reading.release()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, with one sample or more for each run."""
        looks = self._looks()
        if self._reads:
            self.read(looks)
        known = {name: self._known[name][1] if name in self._known else {} for name in looks}
        runs = {name: {**known[name], **_measured(look, _NO_COURSE, _OF_A_LOOK)} for name, look in looks.items()}
        for name, (about, _) in _METRICS.items():
            counts = name.endswith("_total")
            metric = Metric(f"ckpt_{name.removesuffix('_total')}", about, "counter" if counts else "gauge")
            for run, samples in runs.items():
                for labels, value in samples.get(name, ()):
                    metric.add_sample(f"ckpt_{name}", {"run": run, **labels}, value)
            yield metric


def _measured(look: Look, course: Course, names: Iterable[str]) -> _Samples:
    return {name: tuple(_METRICS[name][1](look, course)) for name in names}


def _one(value: Callable[[Look, Course], float | None]) -> _Values:
    """Make a function that returns one sample of a run, or none if the value is unknown."""

    def values(look: Look, course: Course) -> list[_Sample]:
        number = value(look, course)
        return [] if number is None else [({}, float(number))]

    return values


def _number_of(*kinds: str) -> _Values:
    return _one(lambda look, course: len(course.of(*kinds)))


def _of_last_commit(value: Callable[[Moment], float]) -> _Values:
    return _one(lambda look, course: next((value(p.moment) for p in reversed(course.of("commit"))), None))


def _of_last(kind: str, value: Callable[[RunCheck], float | None]) -> _Values:
    return _one(lambda look, course: next((value(one) for one in reversed(look.state.checks_of(kind))), None))


def _last_good_drill(look: Look, course: Course) -> float | None:
    return next((seconds_of(drill.at) for drill in look.state.checks_of("drill") if drill.fault is None), None)


_METRICS: dict[str, tuple[str, _Values]] = {
    "run_state": (
        "1 for the state that the run is in: running, ended, stopped, silent, new, damaged or unreadable",
        lambda look, course: [({"state": look.summary.state}, 1.0)],
    ),
    "last_checkpoint_timestamp_seconds": (
        "when the newest checkpoint was saved, in seconds since 1970",
        _one(lambda look, course: seconds_of(look.summary.saved_at) if look.summary.saved_at else None),
    ),
    "last_checkpoint_step": ("its step", _one(lambda look, course: look.summary.step)),
    "live_step": (
        "the newest step that a running owner has trained and not committed",
        _one(lambda look, course: look.summary.live_step),
    ),
    "live_metric": (
        "a metric of that step",
        lambda look, course: [({"name": name}, value) for name, value in look.summary.live.items()],
    ),
    "checkpoints": ("live checkpoints", _one(lambda look, course: None if look.partial else look.summary.checkpoints)),
    "size_bytes": (
        "bytes of the live checkpoints",
        _one(lambda look, course: None if look.partial else look.summary.size_bytes),
    ),
    "metric": (
        "a metric of the newest checkpoint, or the newest of an evaluation set",
        lambda look, course: [({"name": name}, value) for name, value in look.summary.metrics.items()],
    ),
    "stall_seconds": ("how long training waited for the last save", _of_last_commit(lambda one: one.stall_s)),
    "flush_seconds": ("from its snapshot to its commit", _of_last_commit(lambda one: one.flush_s)),
    "commits_total": ("checkpoints that were committed", _number_of("commit")),
    "failed_saves_total": (
        "saves that failed before a later one of the same process was committed",
        _one(lambda look, course: sum(one.moment.failed_saves for one in course.of("commit"))),
    ),
    "failures_total": ("attempts that failed in a process that lived on", _number_of("failure")),
    "deaths_total": ("owners that ended without a release", _one(lambda look, course: len(course.deaths))),
    "resumes_total": ("owners after the first", _one(lambda look, course: len(course.resumes))),
    "fallbacks_total": ("restores that passed over a checkpoint that did not verify", _number_of("fallback")),
    "rollbacks_total": ("times that training went back to an older checkpoint", _number_of("rollback")),
    "steps_redone_total": (
        "steps that were trained again, as far as commits and failed attempts tell",
        _one(lambda look, course: course.redone_steps),
    ),
    "time_seconds_total": (
        f"the run's wall time, by what it went into: {', '.join(SHARES)}",
        lambda look, course: [({"share": share}, value) for share, value in course.seconds.items()],
    ),
    "goodput_ratio": ("the useful share of the wall time", _one(lambda look, course: course.goodput)),
    "last_good_drill_timestamp_seconds": (
        "when a drill has last restored the run, in seconds since 1970",
        _one(_last_good_drill),
    ),
    "drill_failed": (
        "1 if the last drill could not restore the run",
        _of_last("drill", lambda one: one.fault is not None),
    ),
    "last_verified_timestamp_seconds": (
        "when the whole run was last verified, in seconds since 1970",
        _of_last("verify", lambda one: seconds_of(one.at)),
    ),
    "damaged_checkpoints": (
        "checkpoints that the last verification found damaged",
        _of_last("verify", lambda one: one.figures["damaged_checkpoints"]),
    ),
    "damaged_records": (
        "damaged objects that it found beside the checkpoints, such as ledger entries",
        _of_last("verify", lambda one: one.figures["damaged_records"]),
    ),
}
_OF_A_LOOK = (
    "run_state",
    "last_checkpoint_timestamp_seconds",
    "last_checkpoint_step",
    "live_step",
    "live_metric",
    "checkpoints",
    "size_bytes",
    "metric",
    "last_good_drill_timestamp_seconds",
    "drill_failed",
    "last_verified_timestamp_seconds",
    "damaged_checkpoints",
    "damaged_records",
)
_OF_THE_LEDGER = tuple(name for name in _METRICS if name not in _OF_A_LOOK)
_NO_COURSE = follow(())
