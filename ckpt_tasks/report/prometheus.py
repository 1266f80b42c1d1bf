"""Metrics of runs for Prometheus, read from their ledgers without asking a training, and without writing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from ckpt_tasks.errors import CheckpointNotFoundError, CkptError
from ckpt_tasks.format.parsing import seconds_of
from ckpt_tasks.ledger.goodput import Course, follow
from ckpt_tasks.ledger.history import History
from ckpt_tasks.ledger.timeline import Moment, Timeline, read_timeline
from ckpt_tasks.reading.overview import Look, look_at, places_of, summaries_of
from ckpt_tasks.storage.port import Store

_Sample = tuple[Mapping[str, str], float]
_Samples = Mapping[str, Sequence[_Sample]]
_Values = Callable[[Look, Course], Iterable[_Sample]]


def registry_of(store: Store) -> CollectorRegistry:
    """Return a registry that reads the run in a directory, or the runs directly below it, at each scrape.

    Raises CheckpointNotFoundError if there is none now.
    """
    runs = Runs(store)
    if not summaries_of(places_of(store)):
        raise CheckpointNotFoundError(f"there is no run in {store.url}, nor directly below it")
    registry = CollectorRegistry()
    registry.register(runs)
    return registry


@dataclass
class _Known:
    """What is known of a run up to its entry `n`: its samples by metric, and its time line while it is running."""

    n: int
    samples: _Samples
    timeline: Timeline | None


class Runs:
    """A collector of prometheus_client over runs; it reads only new entries of a ledger that it has read.

    After `most_s` seconds it reads no more whole ledgers: until the next time, runs that are not known have only the
    metrics of their newest entry. Of a run that does not train it keeps the samples alone.
    """

    def __init__(self, root: Store, most_s: float = math.inf):
        self._root, self._most_s = root, most_s
        self._known: dict[str, _Known] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, with one sample or more for each run."""
        until_s = time.monotonic() + self._most_s
        places = places_of(self._root)
        runs = {name: self._samples(name, store, until_s) for name, store in places.items()}
        for name, (about, _) in _METRICS.items():
            counts = name.endswith("_total")
            metric = Metric(f"ckpt_{name.removesuffix('_total')}", about, "counter" if counts else "gauge")
            for run, samples in runs.items():
                for labels, value in samples.get(name, ()):
                    metric.add_sample(f"ckpt_{name}", {"run": run, **labels}, value)
            yield metric

    def _samples(self, name: str, store: Store, until_s: float) -> _Samples:
        """Return a run's samples by metric; none for a directory that is no run."""
        look = look_at(name, store, whole=False)
        if look is None:
            return {}
        known = self._known.get(name)
        if known is not None and known.n == look.n:
            return {**known.samples, **_measured(look, _NO_COURSE, ["run_state"])}
        newest = _measured(look, _NO_COURSE, _OF_THE_NEWEST)
        if time.monotonic() > until_s:
            return newest
        look = look_at(name, store) or look
        try:
            timeline = read_timeline(History(store, whole=False), known=known.timeline if known else None)
        except CkptError:  # The metric of the run's state shows it.
            return newest
        samples = _measured(look, follow(timeline.moments), _METRICS)
        self._known[name] = _Known(look.n, samples, timeline if look.summary.state == "running" else None)
        return samples


def _measured(look: Look, course: Course, names: Iterable[str]) -> _Samples:
    return {name: tuple(_METRICS[name][1](look, course)) for name in names}


def _one(value: Callable[[Look, Course], float | None]) -> _Values:
    """Return one sample for each run, none where the value is unknown."""

    def values(look: Look, course: Course) -> list[_Sample]:
        number = value(look, course)
        return [] if number is None else [({}, float(number))]

    return values


def _number_of(*kinds: str) -> _Values:
    return _one(lambda look, course: len(course.of(*kinds)))


def _of_last_commit(value: Callable[[Moment], float]) -> _Values:
    return _one(lambda look, course: next((value(p.moment) for p in reversed(course.of("commit"))), None))


def _last_good_drill(look: Look, course: Course) -> float | None:
    return next((seconds_of(drill.at) for drill in look.state.drills if drill.fault is None), None)


_METRICS: dict[str, tuple[str, _Values]] = {
    "run_state": (
        "1 for the state that the run is in: running, ended, silent, new, damaged or unreadable",
        lambda look, course: [({"state": look.summary.state}, 1.0)],
    ),
    "last_checkpoint_timestamp_seconds": (
        "when the newest checkpoint was saved, in seconds since 1970",
        _one(lambda look, course: seconds_of(look.summary.saved_at) if look.summary.saved_at else None),
    ),
    "last_checkpoint_step": ("its step", _one(lambda look, course: look.summary.step)),
    "checkpoints": ("live checkpoints", _one(lambda look, course: look.summary.checkpoints)),
    "size_bytes": ("bytes of the live checkpoints", _one(lambda look, course: look.summary.size_bytes)),
    "metric": (
        "a metric of the newest checkpoint, or the newest of an evaluation suite",
        lambda look, course: [({"name": name}, value) for name, value in look.summary.metrics.items()],
    ),
    "stall_seconds": ("how long training waited for the last save", _of_last_commit(lambda one: one.stall_s)),
    "flush_seconds": ("from its snapshot to its commit", _of_last_commit(lambda one: one.flush_s)),
    "commits_total": ("checkpoints that were committed", _number_of("commit")),
    "failures_total": ("attempts that failed in a process that lived on", _number_of("failure")),
    "deaths_total": ("owners that ended without a release", _one(lambda look, course: len(course.deaths))),
    "resumes_total": ("owners after the first", _one(lambda look, course: len(course.resumes))),
    "fallbacks_total": ("restores that passed over a checkpoint that did not verify", _number_of("fallback")),
    "rollbacks_total": ("times that training went back to an older checkpoint", _number_of("rollback")),
    "steps_redone_total": (
        "steps that were completed and had to be done again, as far as commits and failed attempts tell",
        _one(lambda look, course: course.redone_steps),
    ),
    "time_seconds_total": (
        "the run's wall time, by what it went into: useful, lost, saving, starting, down, idle, other",
        lambda look, course: [({"share": share}, value) for share, value in course.seconds.items()],
    ),
    "goodput_ratio": ("the useful share of the wall time", _one(lambda look, course: course.goodput)),
    "last_good_drill_timestamp_seconds": (
        "when a drill has last restored the run, in seconds since 1970",
        _one(_last_good_drill),
    ),
    "drill_failed": (
        "1 if the last drill could not restore the run",
        _one(lambda look, course: any(drill.fault for drill in look.state.drills) if look.state.drills else None),
    ),
}
# One read of a ledger yields these metrics.
_OF_THE_NEWEST = ("run_state", "last_checkpoint_timestamp_seconds", "last_checkpoint_step", "metric")
_NO_COURSE = follow(())


def metric_texts() -> dict[str, str]:
    """Return the text of each metric, by its name."""
    return {f"ckpt_{name}": about for name, (about, _) in _METRICS.items()}
