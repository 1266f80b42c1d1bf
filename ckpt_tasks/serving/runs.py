"""One run in depth for the page: its report and its curves. Ledgers are cached: only new entries are read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from ckpt_tasks.errors import CkptError
from ckpt_tasks.format.ledger import State, lineage
from ckpt_tasks.format.manifest import MAX_MANIFEST_BYTES, Manifest
from ckpt_tasks.format.parsing import finite_json
from ckpt_tasks.ledger.curve import Curve, read_tables
from ckpt_tasks.ledger.goodput import Course, follow
from ckpt_tasks.ledger.history import History
from ckpt_tasks.ledger.timeline import Timeline, read_timeline
from ckpt_tasks.report.charts import Curves, chart_data
from ckpt_tasks.report.kept import kept_because
from ckpt_tasks.report.report import RETURNS_HEAD, SHARES_MEAN, make_report
from ckpt_tasks.storage.port import Store

_MOST_BYTES = 96 << 20  # The memory for cached runs; the run that was viewed longest ago is dropped first.
_MOMENT_BYTES = 2_000


class OpenRun:
    """What the server knows of one run; calls for one run wait for each other."""

    def __init__(self, store: Store):
        self._store, self._lock = store, threading.Lock()
        self._timeline, self._curves = Timeline(), Curves()
        self._course: Course = follow(())

    @property
    def size_bytes(self) -> int:
        """Roughly how much memory it takes."""
        return len(self._timeline.moments) * _MOMENT_BYTES + self._curves.size_bytes

    def curves(self, names: Sequence[str], *, by: str, low: float, high: float, most: int) -> dict[str, Any]:
        """Return the data for charts of some metrics."""
        with self._lock:
            course = self._read(curves=True)
            return chart_data(self._curves, course, names, by=by, low=low, high=high, most=most)

    def about(self) -> dict[str, Any]:
        """Return the run's report and parameters, and what made its newest checkpoint."""
        with self._lock:
            history = History(self._store)
            head = history.head()
            course, state = self._read(), head.state
            kept = {digest: ", ".join(reasons) for digest, reasons in kept_because(state).items()}
            run_key = history.check(None)
            report = make_report(run_key, self._store.url, self._timeline, state, kept, read_curve=_no_curve)
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
                "returns": {"head": RETURNS_HEAD, "rows": report.returns()},
                "happenings": report.happenings(),
                "checkpoints": report.checkpoints,
                "live": len(state.live),
                "environment": self._environment(state),
            }
        )
        return about

    def _read(self, *, curves: bool = False) -> Course:
        """Read new entries of the ledger; with `curves`, also the new tables of steps."""
        history = History(self._store, whole=False)  # A commit's checkpoint is among the newest of its entry.
        before = self._timeline
        self._timeline = read_timeline(history, known=before)
        if self._timeline != before:
            self._course = follow(self._timeline.moments)
        if curves:
            new = [one for one in self._timeline.moments if one.n > self._curves.newest_n]
            commits = [one for one in new if one.kind == "commit" and one.steps is not None]
            tables = dict(zip((one.n for one in commits), read_tables(history, commits), strict=True))
            self._curves.add(new, tables)
        return self._course

    def _environment(self, state: State) -> dict[str, str]:
        for newest in lineage(state.live)[:1]:
            try:
                data = self._store.get(newest.manifest, MAX_MANIFEST_BYTES)
                made = Manifest.from_bytes(data, digest=newest.manifest_digest, name=newest.manifest)
                return dict(made.environment)
            except CkptError as error:
                return {"unknown": str(error)}
        return {}


class OpenRuns:
    """The viewed runs, as many as fit into a limited memory."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, OpenRun] = OrderedDict()
        self._lock = threading.Lock()

    def ask(self, name: str, store: Store, question: Callable[[OpenRun], dict[str, Any]]) -> dict[str, Any]:
        """Answer a request of the page about a run."""
        with self._lock:
            run = self._runs.setdefault(name, OpenRun(store))
            self._runs.move_to_end(name)
        answer = question(run)
        with self._lock:
            while len(self._runs) > 1 and sum(one.size_bytes for one in self._runs.values()) > _MOST_BYTES:
                self._runs.popitem(last=False)
        return answer


def _no_curve(course: Course) -> Curve:
    return Curve()
