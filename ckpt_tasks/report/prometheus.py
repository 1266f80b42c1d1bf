"""Metrics of runs for Prometheus, read from their ledgers: nothing is asked of a training, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from ckpt_tasks.errors import CheckpointNotFoundError, CkptError
from ckpt_tasks.format.keys import LEDGER_PREFIX
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.parsing import seconds_of
from ckpt_tasks.ledger.goodput import Course, follow
from ckpt_tasks.ledger.history import History
from ckpt_tasks.ledger.timeline import Moment, Timeline, read_timeline
from ckpt_tasks.reading.overview import RunSummary, summaries_of
from ckpt_tasks.storage.locations import stores_below
from ckpt_tasks.storage.port import Store

_Values = Callable[[RunSummary, State, Course], Iterable[tuple[Mapping[str, str], float]]]


def registry_of(store: Store) -> CollectorRegistry:
    """Return a registry that reads the run in a directory, or those directly below it, each time that it is asked.

    Raises CheckpointNotFoundError if there is none.
    """
    here = {store.url.rstrip("/").rpartition("/")[2]: store}
    runs = Runs(here if store.names(LEDGER_PREFIX, limit=1) else stores_below(store))
    if not summaries_of(runs.places):
        raise CheckpointNotFoundError(f"there is no run in {store.url}, nor directly below it")
    registry = CollectorRegistry()
    registry.register(runs)
    return registry


class Runs:
    """A collector of prometheus_client over runs; of a ledger it has read, it reads only what is new."""

    def __init__(self, places: Mapping[str, Store]):
        self.places = places
        self._known: dict[str, Timeline] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, with one sample or more for each run."""
        runs = [(run, *self._read(run)) for run in summaries_of(self.places)]
        for name, (about, values) in _METRICS.items():
            counts = name.endswith("_total")
            metric = Metric(f"ckpt_{name.removesuffix('_total')}", about, "counter" if counts else "gauge")
            for run, state, course in runs:
                for labels, value in values(run, state, course):
                    metric.add_sample(f"ckpt_{name}", {"run": run.name, **labels}, value)
            yield metric

    def _read(self, run: RunSummary) -> tuple[State, Course]:
        """Return the newest state and the course of a run; of one that cannot be read, empty ones."""
        history = History(self.places[run.name])
        try:
            timeline = read_timeline(history, known=self._known.get(run.name))
            self._known[run.name] = timeline
            return history.head().state, follow(timeline.moments)
        except CkptError:  # The metric of the run's state says so.
            return State(), follow([])


def _one(value: Callable[[RunSummary, State, Course], float | None]) -> _Values:
    """One sample for each run, none where the value is unknown."""

    def values(run: RunSummary, state: State, course: Course) -> list[tuple[Mapping[str, str], float]]:
        number = value(run, state, course)
        return [] if number is None else [({}, float(number))]

    return values


def _number_of(*kinds: str) -> _Values:
    return _one(lambda run, state, course: len(course.of(*kinds)))


def _of_last_commit(value: Callable[[Moment], float]) -> _Values:
    return _one(lambda run, state, course: next((value(p.moment) for p in reversed(course.of("commit"))), None))


def _last_good_drill(run: RunSummary, state: State, course: Course) -> float | None:
    return next((seconds_of(drill.at) for drill in state.drills if drill.fault is None), None)


_METRICS: dict[str, tuple[str, _Values]] = {
    "run_state": (
        "1 for the state that the run is in: running, ended, silent, new, damaged or unreadable",
        lambda run, state, course: [({"state": run.state}, 1.0)],
    ),
    "last_checkpoint_timestamp_seconds": (
        "when the newest checkpoint was saved, in seconds since 1970",
        _one(lambda run, state, course: seconds_of(run.saved_at) if run.saved_at else None),
    ),
    "last_checkpoint_step": ("its step", _one(lambda run, state, course: run.step)),
    "checkpoints": ("live checkpoints", _one(lambda run, state, course: run.checkpoints)),
    "size_bytes": ("bytes of the live checkpoints", _one(lambda run, state, course: run.size_bytes)),
    "metric": (
        "a metric of the newest checkpoint, or the newest of an evaluation suite",
        lambda run, state, course: [({"name": name}, value) for name, value in run.metrics.items()],
    ),
    "stall_seconds": ("how long training waited for the last save", _of_last_commit(lambda one: one.stall_s)),
    "flush_seconds": ("from its snapshot to its commit", _of_last_commit(lambda one: one.flush_s)),
    "commits_total": ("checkpoints that were committed", _number_of("commit")),
    "failures_total": ("attempts that failed in a process that lived on", _number_of("failure")),
    "deaths_total": ("owners that ended without a release", _one(lambda run, state, course: len(course.deaths))),
    "resumes_total": ("owners after the first", _one(lambda run, state, course: len(course.resumes))),
    "fallbacks_total": ("restores that passed over a checkpoint that did not verify", _number_of("fallback")),
    "rollbacks_total": ("times that training went back to an older checkpoint", _number_of("rollback")),
    "steps_redone_total": (
        "steps that were completed and had to be done again, as far as commits and failed attempts tell",
        _one(lambda run, state, course: course.redone_steps),
    ),
    "time_seconds_total": (
        "the run's wall time, by what it went into: useful, lost, saving, starting, down, idle, other",
        lambda run, state, course: [({"share": share}, value) for share, value in course.seconds.items()],
    ),
    "goodput_ratio": ("the useful share of the wall time", _one(lambda run, state, course: course.goodput)),
    "last_good_drill_timestamp_seconds": (
        "when a drill has last restored the run, in seconds since 1970",
        _one(_last_good_drill),
    ),
    "drill_failed": (
        "1 if the last drill could not restore the run",
        _one(lambda run, state, course: any(drill.fault for drill in state.drills) if state.drills else None),
    ),
}


def metric_texts() -> dict[str, str]:
    """Return the text of each metric, by its name."""
    return {f"ckpt_{name}": about for name, (about, _) in _METRICS.items()}
