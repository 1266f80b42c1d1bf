"""The page's data of one run: its report and its curves. Ledgers are cached, so only new entries are read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ckpt_tasks.errors import CkptError
from ckpt_tasks.format.ledger import State, lineage
from ckpt_tasks.format.parsing import finite_json
from ckpt_tasks.run.ledger.curve import Curve, read_tables
from ckpt_tasks.run.ledger.goodput import Course, Followed
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.live_steps import LiveStep, read_live_steps
from ckpt_tasks.run.opening import read_manifest
from ckpt_tasks.run.overview import life_of
from ckpt_tasks.run.report.charts import Curves, add_live, chart_data
from ckpt_tasks.run.report.kept import kept_because
from ckpt_tasks.run.report.run_report import SHARES_MEAN, make_report
from ckpt_tasks.storage.port import Store

_MOST_BYTES = 96 << 20  # The memory for cached runs; the run that was viewed longest ago is dropped first.
_MOMENT_BYTES = 2_000
_Answer = TypeVar("_Answer")


class OpenRun:
    """The cached ledger and curves of one run; calls for one run wait for each other."""

    def __init__(self, store: Store):
        self._store, self._lock = store, threading.Lock()
        self._followed, self._curves = Followed(store), Curves()

    @property
    def size_bytes(self) -> int:
        """The approximate memory that the run takes, in bytes."""
        return len(self._followed.timeline.moments) * _MOMENT_BYTES + self._curves.size_bytes

    def curves(self, names: Sequence[str], *, by: str, low: float, high: float, most: int) -> dict[str, Any]:
        """Return the data for charts of some metrics."""
        with self._lock:
            course = self._read_curves()
            data = chart_data(self._curves, course, names, by=by, low=low, high=high, most=most)
            add_live(data["lines"], names, self._live_steps(), course, by=by, low=low, high=high)
            return data

    def _live_steps(self) -> list[LiveStep]:
        history = History(self._store, whole=False)
        state = history.head().state
        if life_of(history, state)[0] != "running":
            return []
        return read_live_steps(self._store, state.owner, next((one.step for one in lineage(state.live)), None))

    def about(self) -> dict[str, Any]:
        """Return the run's report, and the environment that made its newest checkpoint."""
        with self._lock:
            history = History(self._store)
            head = history.head()
            course, state = self._followed.read(), head.state
            kept = {digest: ", ".join(reasons) for digest, reasons in kept_because(state).items()}
            run_key = history.check(None)
            report = make_report(run_key, self._store.url, self._followed.timeline, state, kept, read_curve=_no_curve)
        shares = [{"name": n, "seconds": s, "part": part, "means": SHARES_MEAN[n]} for n, s, part in report.shares]
        about: dict[str, Any] = finite_json(
            {
                "run_key": report.run_key,
                "url": report.url,
                "summary": report.summary,
                "caveats": report.caveats(),
                "goodput": course.goodput,
                "wall_s": course.wall_s,
                "shares": shares,
                "facts": report.facts(),
                "returns": dict(zip(("head", "rows"), report.returns(), strict=True)),
                "happenings": report.happenings(),
                "checkpoints": report.checkpoints,
                "live": len(state.live),
                **self._origin(state),
            }
        )
        return about

    def course(self) -> Course:
        """Read new entries of the ledger, and return the run's course."""
        with self._lock:
            return self._followed.read()

    def _read_curves(self) -> Course:
        """Read new entries of the ledger, and the new tables of steps."""
        runs, course = self._followed.runs, self._followed.read()
        if self._followed.runs > runs:
            self._curves = Curves()
        new = [one for one in self._followed.timeline.moments if one.n > self._curves.newest_n]
        commits = [one for one in new if one.kind == "commit" and one.steps is not None]
        tables = dict(
            zip((one.n for one in commits), read_tables(History(self._store, whole=False), commits), strict=True)
        )
        self._curves.add(new, tables)
        return course

    def _origin(self, state: State) -> dict[str, Any]:
        for newest in lineage(state.live)[:1]:
            try:
                manifest = read_manifest(self._store, newest)
                return {"environment": dict(manifest.environment), "ranks": manifest.world_size}
            except CkptError as error:
                return {"environment": {"cannot be read": str(error)}, "ranks": None}
        return {"environment": {}, "ranks": None}


class OpenRuns:
    """The viewed runs, as many as fit into a limited memory."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, OpenRun] = OrderedDict()
        self._lock = threading.Lock()

    def ask(self, name: str, store: Store, question: Callable[[OpenRun], _Answer], *, keep: bool = True) -> _Answer:
        """Answer a request about a run. If not `keep`, a newly cached run is the first to be dropped."""
        with self._lock:
            is_new = name not in self._runs
            run = self._runs.setdefault(name, OpenRun(store))
            if keep or is_new:
                self._runs.move_to_end(name, last=keep)
        answer = question(run)
        with self._lock:
            while len(self._runs) > 1 and sum(one.size_bytes for one in self._runs.values()) > _MOST_BYTES:
                self._runs.popitem(last=False)
        return answer


def _no_curve(course: Course) -> Curve:
    return Curve()
