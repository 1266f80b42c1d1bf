"""A flow run's artifacts on Prefect's pages while it trains: its progress, its checkpoints and its report.

Artifacts never stop training. A thread renews them, so that a long batch leaves none of them old. If Prefect or the
store does not answer, one warning is logged. A request to Prefect is sent once, with a timeout of 5 s. After a failure
nothing is published for a minute or more.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit
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

from ckpt_tasks.checkpoint.restore.reading import Run, run_of
from ckpt_tasks.errors import CheckpointNotFoundError, CkptError, StoreError
from ckpt_tasks.flows.session.session import TrainedRun
from ckpt_tasks.format.layout.steps import StepMetrics
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.process import start_thread
from ckpt_tasks.run.ledger.curve import read_curve
from ckpt_tasks.run.ledger.history import Head
from ckpt_tasks.run.ledger.timeline import Timeline, read_timeline
from ckpt_tasks.run.report.picture import sort_metrics
from ckpt_tasks.run.report.run_report import in_markdown, make_report, to_markdown
from ckpt_tasks.run.report.words import clock, fine_span, number, printable
from ckpt_tasks.run.upkeep.verifying import plan_prune

_PROGRESS_EVERY_S = 5.0  # Update at most this often, since an update takes 7 ms.
_REPORT_EVERY_S = 20.0  # With the pause before it and its own time, no page is older than 30 s.
_REPORT_PART = 1 / 200  # Reports of a very long run come less often: they take at most this share of the time.
_PATIENCE_S = 5.0
_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 960.0  # The pause after a failure doubles with each further failure.
# A completed run tries for 8 s, every 2 s, to update its pages, because nothing updates them later.
_LAST_S, _AGAIN_S = 8.0, 2.0
_MOST_ENTRIES = 1_000  # Pages read this many ledger entries; `ckpt report` reads more.
_BATCHES_MEASURED = 8
_NO_ANSWER = (json.JSONDecodeError, ValidationError)  # A proxy that answers in place of the server causes these.


class RunPages:
    """Keeps a flow run's artifacts up to date: "<run>-progress", "<run>-checkpoints", "<run>-report".

    A run on many ranks also has "<run>-ranks": one line for each gang of this process (`gangs`).

    Creates each artifact once per flow run, even if the flow run is started again. Then a thread updates the progress
    every 5 s and the others every 20 s; each says as of when. Also updates all at the end of the block, unless a signal
    or an error of the store ended the block; after a completed block, retries for 8 s.
    """

    def __init__(
        self,
        ckpt: TrainedRun,
        run_key: str,
        total_steps: int,
        ranks: int = 1,
        gangs: Callable[[], Sequence[Mapping[str, str]]] = tuple,
    ):
        self._ckpt, self._key, self._total, self._ranks = ckpt, run_key, total_steps, ranks
        self._gangs = gangs
        self._ids: dict[str, UUID] = {}
        self._run: Run | None = None
        self._timeline: Timeline | None = None
        self._tables: dict[str, list[StepMetrics] | None] = {}
        self._paces: deque[tuple[float, int]] = deque(maxlen=_BATCHES_MEASURED)
        self._step, self._metrics = 0, dict[str, float]()
        self._report_due_s = self._not_before_s = 0.0
        self._pause_s, self._warned = _PAUSE_S, False
        self._log = get_run_logger()  # The thread has no context of a flow run.
        self._ended = threading.Event()
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # With retries one request could take a minute.
            self._context = copy_context()
        self._client: SyncPrefectClient = get_client(sync_client=True, httpx_settings={"timeout": _PATIENCE_S})
        self._client.__enter__()
        try:
            self._try(self._begin)
            self._thread = start_thread(self._renew, name="ckpt-pages")
        except BaseException:
            self._client.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        # A process that must stop has little time left, and a failing store would cost another wait.
        publishes = error is None or (isinstance(error, Exception) and not isinstance(error, StoreError))
        self._thread.join(_PATIENCE_S if publishes else 1.0)
        if self._thread.is_alive():  # It waits for an answer, and uses the client.
            return
        try:
            if error is None and self._failure is not None:
                raise self._failure
            if publishes:
                until_s = time.monotonic() + (_LAST_S if error is None else 0.0)
                while not self._try(self._publish, last=True) and time.monotonic() < until_s:
                    time.sleep(_AGAIN_S)
        finally:
            self._client.__exit__(None, None, None)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note that training has reached `step`; the thread shows it soon."""
        self._paces.append((time.monotonic(), step))
        self._step, self._metrics = step, dict(metrics)

    def _renew(self) -> None:
        """Update what is due, also within a batch, until the block ends."""
        while not self._ended.wait(_PROGRESS_EVERY_S):
            now_s, step = time.monotonic(), self._ckpt.position
            if step:  # Until the restore it is 0.
                self._step = step
                self._paces.append((now_s, step))
            try:
                self._try(self._publish if now_s >= self._report_due_s else self._show_progress)
            except Exception as error:  # noqa: BLE001 (raised at the end of the block)
                self._failure = error
                return

    def _checkpoints(self) -> list[Checkpoint]:
        """Read the live checkpoints as a reader: the Checkpointer belongs to the thread that trains."""
        with suppress(CheckpointNotFoundError):
            self._run = self._run or run_of(self._ckpt.config)
            return self._run.checkpoints()
        return []

    def _begin(self) -> None:
        self._find_artifacts()
        if checkpoints := self._checkpoints():
            self._step, self._metrics = checkpoints[0].step, dict(checkpoints[0].metrics)
        self._paces.append((time.monotonic(), self._step))
        self._publish()

    def _find_artifacts(self) -> None:
        if not flow_run.id or flow_run.run_count < 2:
            return
        of_flow_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(flow_run.id)]))
        prefix = f"{artifact_key(self._key)}-"
        for artifact in self._client.read_artifacts(artifact_filter=of_flow_run):
            if artifact.key and artifact.key.startswith(prefix):
                self._ids[artifact.key.removeprefix(prefix)] = artifact.id

    def _publish(self) -> None:
        self._show_progress()
        if self._checkpoints():
            started_s = time.monotonic()
            self._show_report()
            ended_s = time.monotonic()
            self._report_due_s = ended_s + max(_REPORT_EVERY_S, (ended_s - started_s) / _REPORT_PART)

    def _show_report(self) -> None:
        assert self._run is not None
        self._timeline = read_timeline(self._run.history, _MOST_ENTRIES, self._timeline)
        head = self._run.head()
        report = make_report(
            self._key,
            self._run.history.store.url,
            self._timeline,
            head.state,
            self._fates(head),
            read_curve=partial(read_curve, self._run.history, known=self._tables),
        )
        name, is_first = in_markdown(self._key), "report" not in self._ids
        self._put("report", "markdown", to_markdown(report), f"{name}: {report.summary} · {_as_of()}")
        ui_url = get_current_settings().ui_url
        report_url = f"{ui_url.rstrip('/')}/artifacts/artifact/{self._ids['report']}" if ui_url else None
        # Without the host: a later server of the same database has another port.
        link = f" [The run's report]({urlsplit(report_url).path})" if report_url else ""
        self._put("checkpoints", "table", _table(report.checkpoints), f"The checkpoints of {name}, newest first.{link}")
        if gangs := self._gangs():
            self._put(
                "ranks", "table", _table(gangs), f"The worker groups that have trained {name}, newest first.{link}"
            )
        if is_first and report_url:
            get_run_logger().info("Report: %s", report_url)

    def _show_progress(self) -> None:
        percentage = round(100.0 * min(1.0, self._step / self._total), 1) if self._total > 0 else 100.0
        self._put("progress", "progress", percentage, self._progress_text())

    def _progress_text(self) -> str:
        """Return the line below the progress bar: step, first metric, speed, time left, and as of when."""
        parts = [f"step {self._step:,} of {self._total:,}"]
        parts += [f"{in_markdown(name)} {number(self._metrics[name])}" for name in sort_metrics(self._metrics)[:1]]
        parts += [f"{self._ranks} ranks"] if self._ranks > 1 else []
        (since_s, first), (until_s, last) = self._paces[0], self._paces[-1]
        if last > first:
            pace_s = (until_s - since_s) / (last - first)
            parts.append(f"{1 / pace_s:.1f} steps/s" if 0 < pace_s <= 1 else f"{fine_span(pace_s)} a step")
            if self._step < self._total:
                parts.append(f"ETA {clock((self._total - self._step) * pace_s)}")
        return " · ".join([*parts, _as_of()])

    def _fates(self, head: Head) -> dict[str, str]:
        """Return, by manifest digest, why the policy keeps a checkpoint, or that the next prune removes it."""
        verdicts = plan_prune(head.state, self._ckpt.config.retention_policy)
        return {
            v.manifest_digest: ", ".join(v.reasons) if v.keep else f"until the next prune: {v.reasons[0]}"
            for v in verdicts
        }

    def _put(self, name: str, kind: str, data: Any, description: str) -> None:
        """Create or update the artifact "<run>-<name>" of this flow run."""
        if name in self._ids:
            self._client.update_artifact(self._ids[name], ArtifactUpdate(data=data, description=description))
            return
        key = f"{artifact_key(self._key)}-{name}"
        run_id = UUID(flow_run.id) if flow_run.id else None
        new = ArtifactCreate(type=kind, key=key, data=data, description=description, flow_run_id=run_id)
        self._ids[name] = self._client.create_artifact(new).id

    def _try(self, publish: Callable[[], None], *, last: bool = False) -> bool:
        if time.monotonic() < self._not_before_s and not last:
            return False
        try:
            self._context.run(publish)
        except (httpx.HTTPError, PrefectException, CkptError, *_NO_ANSWER) as error:
            self._not_before_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            if not self._warned:
                self._log.warning("This run's pages are not up to date: %s: %s", type(error).__name__, error)
                self._warned = True
            return isinstance(error, CkptError)  # Another try would repeat an error of the run itself.
        self._pause_s = _PAUSE_S
        return True


def _as_of() -> str:
    return f"as of {datetime.now(UTC):%H:%M:%S} UTC"


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Write a table for Prefect's page, which shows cells as markdown, and headings as text."""
    return json.dumps([{printable(name): in_markdown(cell) for name, cell in row.items()} for row in rows])


def artifact_key(run_key: str) -> str:
    """Return a run's key in the form that Prefect requires of artifact keys: lowercase letters, digits, dashes."""
    return re.sub(r"[^a-z0-9]+", "-", run_key.lower()).strip("-") or "run"
