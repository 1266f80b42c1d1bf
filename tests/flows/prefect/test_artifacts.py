"""What Prefect's pages show of a run: artifacts that are made once, kept up to date, and never in training's way."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import Artifact, FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import PREFECT_API_URL, temporary_settings

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.flows.prefect.artifacts import RunPages, artifact_key
from ckpt_tasks.flows.train import train
from tests.support.cli_runs import save_steps
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("harness")


def run(run_dir: Path, total_steps: int, **options: Any) -> None:
    checkpoint = {"checkpoint_dir": str(run_dir), "max_num_checkpoints": 2}
    defaults = {"checkpoint": checkpoint, "program": "tests.support.tiny:Tiny", "batch_steps": 5}
    train(run_key="tiny_1", total_steps=total_steps, **{**defaults, **options})


def newest() -> tuple[FlowRun, dict[str, Artifact]]:
    """Return the newest flow run and its artifacts by key."""
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)[0]
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
        found = client.read_artifacts(artifact_filter=mine)
    assert len(found) == len({one.key for one in found})
    return flow_run, {str(one.key): one for one in found}


def test_a_run_has_three_pages(run_dir: Path, tmp_path: Path) -> None:
    """Progress with speed, the checkpoints with why they stay, and the report with its picture: each made once.

    The next flow run of the same run has pages of its own, and its report holds the attempt that failed before. A cell
    is markdown: what somebody wrote into the run is text there.
    """
    failing = {"fail_at": 7, "times": 1, "failures": str(tmp_path / "failures")}
    with pytest.raises(RuntimeError):
        run(run_dir, 12, params=failing, retries=0)
    _, before = newest()
    assert before["tiny-1-progress"].data == pytest.approx(100 * 5 / 12, abs=0.1)
    assert "an attempt failed" in str(before["tiny-1-report"].data)
    leased = open_run(run_dir)
    with leased.lease(leased.find(5), holder="![x](http://e.vil) <b>"):
        run(run_dir, 12)
    flow_run, pages = newest()
    assert flow_run.name == "tiny_1 to 12"
    assert set(pages) == {"tiny-1-progress", "tiny-1-checkpoints", "tiny-1-report"}
    progress, checkpoints, report = (pages[f"tiny-1-{name}"] for name in ("progress", "checkpoints", "report"))
    assert progress.data == 100
    assert str(progress.description).startswith("step 12 of 12 · loss ")
    rows = {row["step"]: row["kept because"] for row in json.loads(str(checkpoints.data))}
    assert (rows["12"], rows["10"]) == ("newest, one of the newest 2", "one of the newest 2")
    assert r"leased by !\[x\](http\://e.vil) \<b\>" in rows["5"]
    assert report.id != before["tiny-1-report"].id
    for words in ("data:image/svg+xml;base64,", "goodput", "RuntimeError: injected in step 7"):
        assert words in str(report.data)
    assert str(report.description).startswith(r"tiny\_1: step 12, goodput ")
    assert str(checkpoints.description).endswith(f"[The run's report](/artifacts/artifact/{report.id})")


@flow
def watched(run_dir: str, run_key: str, last: int, server: str = "") -> None:
    """Show some steps of a run on its pages."""
    with (
        temporary_settings({PREFECT_API_URL: server} if server else {}),
        Checkpointer(CheckpointConfig(checkpoint_dir=run_dir)) as ckpt,
        RunPages(ckpt, run_key, last) as pages,
    ):
        for step in range(1, last + 1):
            pages.show(step, {"loss": 1.0})


@pytest.mark.slow
def test_many_short_batches_are_few_requests(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred batches within seconds change the pages a handful of times, and make none of them again."""
    calls: list[str] = []
    for name in ("create_artifact", "update_artifact"):
        real = getattr(SyncPrefectClient, name)

        def counting(self: SyncPrefectClient, *given: Any, name: str = name, real: Any = real) -> Any:
            calls.append(name)
            return real(self, *given)

        monkeypatch.setattr(SyncPrefectClient, name, counting)
    watched(str(save_steps(run_dir, 1)), "many", 200)
    assert calls.count("create_artifact") == 3
    assert calls.count("update_artifact") <= 3 + 6


@flow
def long_batch(run_dir: str, again: str) -> None:
    """Train two steps in one batch: the second one waits until the pages show the first."""
    state = {"weights": torch.zeros(2)}
    with (
        Checkpointer(CheckpointConfig(checkpoint_dir=run_dir)) as ckpt,
        RunPages(ckpt, "long", 10),
    ):
        ckpt.restore(state)
        ckpt.save(5, state)
        ckpt.wait()

        def shows(name: str, words: str) -> bool:
            artifact = newest()[1].get(f"long-{name}")
            return artifact is not None and words in str(artifact.description)

        until(lambda: shows("progress", "step 5 of 10") and shows("report", again), 120.0)


def test_a_long_batch_leaves_no_page_old(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P73: within a batch, which shows nothing by itself, a timer renews the pages, and each says as of when."""
    for name in ("_PROGRESS_EVERY_S", "_REPORT_EVERY_S"):
        monkeypatch.setattr(f"ckpt_tasks.flows.prefect.artifacts.{name}", 0.2)
    long_batch(str(run_dir), "step 5, goodput ")
    assert re.search(r"step 5 of 10 .*· as of \d\d:\d\d:\d\d UTC$", str(newest()[1]["long-progress"].description))
    assert re.search(r" · as of \d\d:\d\d:\d\d UTC$", str(newest()[1]["long-report"].description))


class Unwell(BaseHTTPRequestHandler):
    """A server that says to every request that it should come again, and a proxy that answers with a page."""

    def do_POST(self) -> None:
        self.send_response(200 if "/proxy/" in self.path else 503)
        self.end_headers()
        self.wfile.write(b"<html>Back soon.</html>")

    do_GET = do_POST  # noqa: N815 — what http.server calls

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def unwell() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Unwell) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    ["ConnectError", *(pytest.param(e, marks=pytest.mark.slow) for e in ("PrefectHTTPStatusError", "JSONDecodeError"))],
)
def test_a_server_that_is_away_stops_nothing(
    run_dir: Path, unwell: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the API cannot be reached, or is unwell, one warning says so, and training goes on.

    It is asked once at the beginning and once at the end: asked again, as Prefect does by itself, it takes minutes.
    """
    asked: list[str] = []
    send = httpx.HTTPTransport.handle_request

    def counting(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return send(transport, request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", counting)
    monkeypatch.setattr("ckpt_tasks.flows.prefect.artifacts._LAST_S", 0.0)
    monkeypatch.setattr("ckpt_tasks.flows.prefect.artifacts._AGAIN_S", 0.0)
    paths = {"PrefectHTTPStatusError": f"{unwell}/api", "JSONDecodeError": f"{unwell}/proxy/api"}
    log, said = logging.getLogger("prefect.flow_runs"), Kept()
    log.addHandler(said)
    try:
        server = paths.get(error, "http://127.0.0.1:9/api")
        watched(str(save_steps(run_dir, 1)), "away", 100, server)
    finally:
        log.removeHandler(said)
    assert len([url for url in asked if url.startswith(server)]) == 2
    assert [one.split(": ")[:2] for one in said.messages] == [["This run's pages are not up to date", error]]


class Kept(logging.Handler):
    """Keep what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.mark.slow
def test_the_end_is_published_in_any_case(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that time out do not leave the pages of a completed run at an earlier step; our own errors show."""
    update, failures = SyncPrefectClient.update_artifact, iter(range(2))

    def slow(self: SyncPrefectClient, *given: Any) -> None:
        if next(failures, None) is not None:
            raise httpx.ReadTimeout("injected")
        update(self, *given)

    monkeypatch.setattr("ckpt_tasks.flows.prefect.artifacts._PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr(SyncPrefectClient, "update_artifact", slow)
    watched(str(save_steps(run_dir, 1)), "late", 9)
    assert next(failures, None) is None
    assert str(newest()[1]["late-progress"].description).startswith("step 9 of 9")
    monkeypatch.setattr(SyncPrefectClient, "update_artifact", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        watched(str(run_dir), "wrong", 9)


@pytest.mark.parametrize(
    ("run_key", "key"), [("lm-7", "lm-7"), ("LM 7/β", "lm-7"), ("---", "run"), ("../<b>", "b"), ("", "run")]
)
def test_keys_are_what_prefect_takes(run_key: str, key: str) -> None:
    """A run's key becomes lowercase letters, digits and dashes."""
    assert artifact_key(run_key) == key
