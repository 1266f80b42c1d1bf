"""Events for Prefect's automations: one for every commit, failed save, restore and evaluation.

Events are for consumers that want to act soon. They are sent once, without waiting, and may be lost; only the ledger is
reliable. docs/EVALUATIONS.md lists the payloads.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from queue import Empty
from typing import Any, TypeVar

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.exceptions import Abort, EventTooLarge
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.checkpoint.restore.restore import RestoreReport
from ckpt_tasks.checkpoint.save.listening import Listener
from ckpt_tasks.errors import CkptError
from ckpt_tasks.flows.session.session import TrainedRun
from ckpt_tasks.format.parsing import finite_json
from ckpt_tasks.format.records import Checkpoint

_log = logging.getLogger("ckpt_tasks")
_Found = TypeVar("_Found")
_MOST_TEXT = 2000
_PAGE = 200  # The server's limit for one answer.
_END_S, _STOPPED_S = 20.0, 3.0
_AWAY_S, _ANSWER_S = 30.0, 5.0
_LOOK_S, _LOOK_AGAIN_S = 0.05, 1.0
_MOST_KEY = 512  # Prefect's limit for the key of an asset.
_NOT_IN_KEYS = re.compile(r"[\s\0#?&%\"'<>\[\]{}|\\^`]")


def announce(
    ckpt: TrainedRun, run_key: str, *, program: str | None = None, params: Mapping[str, Any] | None = None
) -> None:
    """Send an event for every commit, failed save and restore of this Checkpointer; call it within the flow.

    The events belong to the caller's flow run. `program` and `params` go into the events, for evaluations.
    """
    common = {"run_key": run_key, "checkpoint_dir": absolute(ckpt.config.location.url)}
    made_by = {"program": program, "params": dict(params or {})}
    context = copy_context()  # Commits happen in a thread without a flow run context.

    def send(event: str, payload: Mapping[str, Any], resource: Mapping[str, str] | None = None) -> None:
        context.copy().run(_send, event, resource or _resource(run_key), {**common, **payload})

    def committed(checkpoint: Checkpoint) -> None:
        details = _of_checkpoint(checkpoint)
        send("ckpt.committed", {**details, **made_by})
        key = asset_key(common["checkpoint_dir"], run_key, checkpoint)
        name = {"prefect.resource.id": key, "prefect.resource.name": f"{run_key}, step {checkpoint.step}"}
        send("prefect.asset.materialization.succeeded", details, name)

    def failed(step: int, why: BaseException) -> None:
        message = why.message if isinstance(why, CkptError) else str(why)
        send("ckpt.save_failed", {"step": step, "error": type(why).__name__, "message": message[:_MOST_TEXT]})

    def restored(report: RestoreReport) -> None:
        details = {
            "step": report.step,
            "source": report.source,
            "seconds": report.seconds,
            "size_bytes": report.size_bytes,
        }
        send(
            "ckpt.restored",
            {**details, **made_by, "skipped": [[step, why[:_MOST_TEXT]] for step, why in report.skipped]},
        )

    ckpt.listen(Listener(committed=committed, failed=failed, restored=restored))


def announce_evaluation(
    run: Run, checkpoint_dir: str, checkpoint: Checkpoint, suite: str, metrics: Mapping[str, float]
) -> None:
    """Send the event of a new evaluation."""
    run_key = run.run_key or ""
    common = {"run_key": run_key, "checkpoint_dir": absolute(checkpoint_dir), "step": checkpoint.step}
    details = {"manifest_digest": checkpoint.manifest_digest, "suite": suite, "metrics": finite_json(metrics)}
    _send("ckpt.evaluated", _resource(run_key), {**common, **details})


@contextmanager
def delivers_events() -> Iterator[None]:
    """At the end of the block wait until Prefect's server has the events; drop the rest with a warning.

    Waits at most 20 s, or 3 s after a signal or a crash. Otherwise the process would deliver them one by one at its
    end, and take 7 s for each if the server is gone. Prefect's engine would then try for five minutes to set the flow
    run's final state, and raise. If the server does not answer within another 30 s, raises Abort, which sets no state.
    """
    patience_s, ended = _STOPPED_S, "completed"
    try:
        yield
        patience_s = _END_S
    except Exception as error:
        patience_s, ended = _END_S, f"failed, {type(error).__name__}: {error!s:.{_MOST_TEXT}}"
        raise
    finally:
        queue, until_s, dropped = EventsWorker.instance()._queue, time.monotonic() + patience_s, 0
        while queue.unfinished_tasks and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        with suppress(Empty):
            while True:
                queue.get_nowait()
                queue.task_done()
                dropped += 1
        if dropped:
            _log.warning("Prefect's server did not take %d events; what was committed is in the run's ledger.", dropped)
        if patience_s == _END_S and not _answers_within(_AWAY_S):
            why = f"Prefect's server is away: it is not told that this flow run has {ended}"
            _log.warning("%s. All commits are made; the next start with this run key resumes from them.", why)
            raise Abort(why)


@contextmanager
def client_without_retries(timeout_s: float) -> Iterator[SyncPrefectClient]:
    """Yield a client of Prefect's server that waits `timeout_s` for an answer; with retries it could wait a minute."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings={"timeout": timeout_s}, sync_client=True) as client,
    ):
        yield client


def read_all(read: Callable[..., list[_Found]], **asked: Any) -> list[_Found]:
    """Return everything that a reading method of a Prefect client finds, page by page."""
    found: list[_Found] = []
    while True:
        page = read(**asked, limit=_PAGE, offset=len(found))
        found += page
        if len(page) < _PAGE:
            return found


def _answers_within(patience_s: float) -> bool:
    until_s = time.monotonic() + patience_s
    with client_without_retries(_ANSWER_S) as client:
        while client.api_healthcheck() is not None:
            if time.monotonic() > until_s:
                return False
            time.sleep(_LOOK_AGAIN_S)
    return True


def absolute(checkpoint_dir: str) -> str:
    """Return a directory as an absolute path, for other processes of this host; return a URL unchanged."""
    return checkpoint_dir if "://" in checkpoint_dir else str(Path(checkpoint_dir).absolute())


def asset_key(checkpoint_dir: str, run_key: str, checkpoint: Checkpoint) -> str:
    """Return a checkpoint's URI as an asset in Prefect: its URL, without the characters that Prefect refuses.

    A URI that is too long for Prefect becomes ckpt://RUN_KEY/ATTEMPT.
    """
    attempt = checkpoint.manifest.rpartition("/")[0]
    place = checkpoint_dir if "://" in checkpoint_dir else f"file://{checkpoint_dir}"
    key = _NOT_IN_KEYS.sub("_", f"{place.rstrip('/')}/{attempt}")
    return key if len(key) <= _MOST_KEY else f"ckpt://{run_key}/{attempt}"


def _send(event: str, resource: Mapping[str, str], payload: Mapping[str, Any]) -> None:
    try:
        emit_event(event, resource=dict(resource), payload=dict(payload))
    except EventTooLarge as error:
        _log.warning("The event %s was not sent: %s", event, error)


def _resource(run_key: str) -> dict[str, str]:
    return {
        "prefect.resource.id": f"ckpt-tasks.run.{run_key}",
        "prefect.resource.name": run_key,
        "ckpt-tasks.run-key": run_key,
    }


def _of_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "epochs": checkpoint.epochs,
        "manifest_digest": checkpoint.manifest_digest,
        "metrics": finite_json(checkpoint.metrics),
        "size_bytes": checkpoint.size_bytes,
        "waited_s": checkpoint.cost_s,
        "saved_at": checkpoint.saved_at,
    }
