"""What Prefect's pages show of a run while a flow run trains it: how far it is, its checkpoints, and its report.

Pages observe. Where Prefect or the store cannot be reached, one warning says so, and training goes on: such a call is
made once, is given up after seconds, and is not made again for a while.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings
from pydantic import ValidationError

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import CkptError, StoreError
from ckpt_tasks.ledger.history import Head
from ckpt_tasks.ledger.timeline import Timeline, read_timeline
from ckpt_tasks.reading.reading import Run, run_of
from ckpt_tasks.report.picture import sort_metrics
from ckpt_tasks.report.report import in_markdown, make_report, to_markdown
from ckpt_tasks.report.words import clock, fine_span, number, printable
from ckpt_tasks.upkeep.upkeep import plan_prune

__all__ = ["RunPages", "artifact_key"]

_PROGRESS_EVERY_S = 5.0  # an update takes 7 ms
_REPORT_EVERY_S = 120.0
_REPORT_PART = 1 / 2000  # of all time goes into reports at most, 15 ms of a batch of 30 s
_PATIENCE_S = 5.0
_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 960.0  # after a failure, twice as long after each more
_MOST_ENTRIES = 1_000  # of the ledger; `ckpt report` reads more
_BATCHES_MEASURED = 8
_NO_ANSWER = (json.JSONDecodeError, ValidationError)  # what stands between has answered in the server's place


class RunPages:
    """Keep a flow run's artifacts up to date: "<run>-progress", "<run>-checkpoints" and "<run>-report".

    Each is made once for a flow run, however often that is started, and then changed: the progress every 5 s at most,
    the others every 2 min; all of them at the end of the block, unless a signal or the store ended it.
    """

    def __init__(self, ckpt: Checkpointer, run_key: str, total_steps: int):
        self._ckpt, self._key, self._total = ckpt, run_key, total_steps
        self._ids: dict[str, UUID] = {}
        self._run: Run | None = None
        self._timeline: Timeline | None = None
        self._paces: deque[tuple[float, int]] = deque(maxlen=_BATCHES_MEASURED)
        self._step, self._metrics = 0, dict[str, float]()
        self._progress_due_s = self._report_due_s = self._not_before_s = 0.0
        self._pause_s, self._warned = _PAUSE_S, False

    def __enter__(self) -> Self:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # else an attempt would take a minute
            self._context = copy_context()
        self._client: SyncPrefectClient = get_client(sync_client=True, httpx_settings={"timeout": _PATIENCE_S})
        self._client.__enter__()
        try:
            self._try(self._begin)
        except BaseException:
            self._client.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # A process that must stop has little time left, and a failing store would be waited for once more.
            if error is None or (isinstance(error, Exception) and not isinstance(error, StoreError)):
                self._try(self._publish)
        finally:
            self._client.__exit__(None, None, None)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that training has come to a step; what was shown a moment ago is left as it is."""
        now_s = time.monotonic()
        self._paces.append((now_s, step))
        self._step, self._metrics = step, dict(metrics)
        if now_s >= self._report_due_s:
            self._try(self._publish)
        elif now_s >= self._progress_due_s:
            self._try(self._show_progress)

    def _begin(self) -> None:
        self._find_pages()
        checkpoints = self._ckpt.checkpoints()
        if checkpoints:
            self._step, self._metrics = checkpoints[0].step, dict(checkpoints[0].metrics)
        self._paces.append((time.monotonic(), self._step))
        self._publish()

    def _find_pages(self) -> None:
        if not flow_run.id or flow_run.run_count < 2:
            return
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(flow_run.id)]))
        prefix = f"{artifact_key(self._key)}-"
        for one in self._client.read_artifacts(artifact_filter=mine):
            if one.key and one.key.startswith(prefix):
                self._ids[one.key.removeprefix(prefix)] = one.id

    def _publish(self) -> None:
        self._show_progress()
        if self._ckpt.checkpoints():
            started_s = time.monotonic()
            self._show_report()
            ended_s = time.monotonic()
            self._report_due_s = ended_s + max(_REPORT_EVERY_S, (ended_s - started_s) / _REPORT_PART)

    def _show_report(self) -> None:
        if self._run is None:
            self._run = run_of(self._ckpt.config)
        self._timeline = read_timeline(self._run.history, _MOST_ENTRIES, self._timeline)
        head = self._run.head()
        report = make_report(self._key, self._run.history.store.url, self._timeline, head.state, self._kept(head))
        name, first = in_markdown(self._key), "report" not in self._ids
        self._put("report", "markdown", to_markdown(report), f"{name}: {report.summary}")
        page = get_current_settings().ui_url
        where = f"{page.rstrip('/')}/artifacts/artifact/{self._ids['report']}" if page else None
        description = f"The checkpoints of {name}, newest first." + (f" [The run's report]({where})" if where else "")
        # Prefect's page shows the cells of a table as markdown, and their headings as text.
        rows = [{printable(name): in_markdown(cell) for name, cell in row.items()} for row in report.checkpoints]
        self._put("checkpoints", "table", json.dumps(rows), description)
        if first and where:
            get_run_logger().info("Report: %s", where)

    def _show_progress(self) -> None:
        percentage = round(100.0 * min(1.0, self._step / self._total), 1) if self._total > 0 else 100.0
        self._put("progress", "progress", percentage, self._said())
        self._progress_due_s = time.monotonic() + _PROGRESS_EVERY_S

    def _said(self) -> str:
        """Return the line below the bar: step, first metric, speed and time left."""
        parts = [f"step {self._step:,} of {self._total:,}"]
        parts += [f"{in_markdown(name)} {number(self._metrics[name])}" for name in sort_metrics(self._metrics)[:1]]
        (since_s, first), (until_s, last) = self._paces[0], self._paces[-1]
        if last > first:
            pace_s = (until_s - since_s) / (last - first)
            parts.append(f"{1 / pace_s:.1f} steps/s" if 0 < pace_s <= 1 else f"{fine_span(pace_s)} a step")
            if self._step < self._total:
                parts.append(f"ETA {clock((self._total - self._step) * pace_s)}")
        return " · ".join(parts)

    def _kept(self, head: Head) -> dict[str, str]:
        verdicts = plan_prune(head.state, self._ckpt.config.retention_policy)
        return {
            v.manifest_digest: ", ".join(v.reasons) if v.keep else f"until the next prune: {v.reasons[0]}"
            for v in verdicts
        }

    def _put(self, what: str, kind: str, data: Any, description: str) -> None:
        """Make an artifact of this flow run, or change the one that it has."""
        if what in self._ids:
            self._client.update_artifact(self._ids[what], ArtifactUpdate(data=data, description=description))
            return
        key = f"{artifact_key(self._key)}-{what}"
        run_id = UUID(flow_run.id) if flow_run.id else None
        new = ArtifactCreate(type=kind, key=key, data=data, description=description, flow_run_id=run_id)
        self._ids[what] = self._client.create_artifact(new).id

    def _try(self, publish: Callable[[], None]) -> None:
        if time.monotonic() < self._not_before_s:
            return
        try:
            self._context.run(publish)
            self._pause_s = _PAUSE_S
        except (httpx.HTTPError, PrefectException, CkptError, *_NO_ANSWER) as error:
            self._not_before_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            if not self._warned:
                get_run_logger().warning("This run's pages are not up to date: %s: %s", type(error).__name__, error)
                self._warned = True


def artifact_key(run_key: str) -> str:
    """Return a run's key as Prefect's rule for the keys of artifacts has it: lowercase letters, digits, dashes."""
    return re.sub(r"[^a-z0-9]+", "-", run_key.lower()).strip("-") or "run"
