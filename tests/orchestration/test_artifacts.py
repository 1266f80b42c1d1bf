"""What Prefect's pages show of a run: artifacts that are made once, kept up to date, and never in training's way."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import Artifact, FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import PREFECT_API_URL, temporary_settings

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.flows.train import train
from ckpt_tasks.orchestration.artifacts import RunPages, artifact_key
from tests.support.cli_runs import save_steps

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


def test_a_run_has_three_pages(run_dir: Path) -> None:
    """Progress with speed, the checkpoints with why they stay, and the report with its picture: each made once."""
    run(run_dir, 12)
    flow_run, pages = newest()
    assert flow_run.name == "tiny_1 to 12"
    assert set(pages) == {"tiny-1-progress", "tiny-1-checkpoints", "tiny-1-report"}
    progress = pages["tiny-1-progress"]
    assert progress.data == 100
    assert str(progress.description).startswith("step 12 of 12 · loss ")
    rows = json.loads(str(pages["tiny-1-checkpoints"].data))
    assert [(row["step"], row["kept because"]) for row in rows] == [
        ("12", "newest, one of the newest 2"),
        ("10", "one of the newest 2"),
    ]
    report = str(pages["tiny-1-report"].data)
    assert "data:image/svg+xml;base64," in report
    assert "goodput" in report
    assert str(pages["tiny-1-report"].description).startswith(r"tiny\_1: step 12, goodput ")
    link = f"/artifacts/artifact/{pages['tiny-1-report'].id})"
    assert str(pages["tiny-1-checkpoints"].description).endswith(link)


def test_a_resume_shows_what_was_before(run_dir: Path, tmp_path: Path) -> None:
    """The next flow run of the same run has pages of its own, and its report holds the attempt that failed before."""
    failing = {"fail_at": 7, "times": 1, "failures": str(tmp_path / "failures")}
    with pytest.raises(RuntimeError):
        run(run_dir, 10, params=failing, retries=0)
    _, before = newest()
    assert before["tiny-1-progress"].data == 50
    assert "an attempt failed" in str(before["tiny-1-report"].data)
    run(run_dir, 10)
    _, after = newest()
    assert after["tiny-1-report"].id != before["tiny-1-report"].id
    assert r"RuntimeError: injected in step 7" in str(after["tiny-1-report"].data)


def test_many_short_batches_are_few_requests(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred batches within seconds change the pages a handful of times, and make none of them again."""
    calls: list[str] = []
    for name in ("create_artifact", "update_artifact"):
        real = getattr(SyncPrefectClient, name)

        def counting(self: SyncPrefectClient, *given: Any, name: str = name, real: Any = real) -> Any:
            calls.append(name)
            return real(self, *given)

        monkeypatch.setattr(SyncPrefectClient, name, counting)

    @flow
    def watched() -> None:
        with Checkpointer(config_of(run_dir)) as ckpt, RunPages(ckpt, "many", 200) as pages:
            for step in range(1, 201):
                pages.show(step, {"loss": 1.0})

    save_steps(run_dir, 1)
    watched()
    assert calls.count("create_artifact") == 3
    assert calls.count("update_artifact") <= 3 + 6


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


@pytest.mark.parametrize("error", ["ConnectError", "PrefectHTTPStatusError", "JSONDecodeError"])
def test_a_server_that_is_away_stops_nothing(run_dir: Path, unwell: str, error: str) -> None:
    """Where the API cannot be reached, or is unwell, one warning says so, nothing waits, and training goes on."""
    url = {
        "ConnectError": "http://127.0.0.1:9/api",
        "PrefectHTTPStatusError": f"{unwell}/api",
        "JSONDecodeError": f"{unwell}/proxy/api",
    }[error]
    said: list[str] = []

    class Warnings(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Warnings(logging.WARNING)

    @flow
    def watched() -> float:
        started_s = time.monotonic()
        with (
            temporary_settings({PREFECT_API_URL: url}),
            Checkpointer(config_of(run_dir)) as ckpt,
            RunPages(ckpt, "away", 100) as pages,
        ):
            for step in range(1, 101):
                pages.show(step, {"loss": 1.0})
        return time.monotonic() - started_s

    save_steps(run_dir, 1)
    log = logging.getLogger("prefect.flow_runs")
    log.addHandler(handler)
    try:
        assert watched() < 15  # asked again, as Prefect does by itself, it would take a minute
    finally:
        log.removeHandler(handler)
    assert [one.split(": ")[:2] for one in said] == [["This run's pages are not up to date", error]]


def test_the_end_is_published_in_any_case(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that time out do not leave the pages of a completed run at an earlier step."""
    update, failures = SyncPrefectClient.update_artifact, iter(range(2))

    def slow(self: SyncPrefectClient, *given: Any) -> None:
        if next(failures, None) is not None:
            raise httpx.ReadTimeout("injected")
        update(self, *given)

    @flow
    def watched() -> None:
        with Checkpointer(config_of(run_dir)) as ckpt, RunPages(ckpt, "late", 9) as pages:
            monkeypatch.setattr(SyncPrefectClient, "update_artifact", slow)
            pages.show(8, {"loss": 1.0})
            pages.show(9, {"loss": 1.0})

    save_steps(run_dir, 1)
    monkeypatch.setattr("ckpt_tasks.orchestration.artifacts._PROGRESS_EVERY_S", 0.0)
    watched()
    assert next(failures, None) is None
    assert str(newest()[1]["late-progress"].description).startswith("step 9 of 9")


def test_our_own_errors_show(run_dir: Path) -> None:
    """What is not the network's or the store's fault fails the flow run."""

    @flow
    def watched() -> None:
        with Checkpointer(config_of(run_dir)) as ckpt, RunPages(ckpt, "wrong", 10) as pages:
            pages.show(1, {"loss": "not a number"})  # type: ignore[dict-item]

    with pytest.raises(TypeError):
        watched()


def config_of(run_dir: Path) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_dir=str(run_dir))


@pytest.mark.parametrize(
    ("run_key", "key"), [("lm-7", "lm-7"), ("LM 7/β", "lm-7"), ("---", "run"), ("../<b>", "b"), ("", "run")]
)
def test_keys_are_what_prefect_takes(run_key: str, key: str) -> None:
    """A run's key becomes lowercase letters, digits and dashes."""
    assert artifact_key(run_key) == key


def test_a_cell_of_the_table_shows_a_lease_as_it_stands(run_dir: Path) -> None:
    """Prefect's page shows a cell as markdown: what somebody wrote into the run is text there."""
    save_steps(run_dir, 1)
    leased = open_run(run_dir)
    with leased.lease(leased.checkpoints()[0], holder="![x](http://e.vil) <b>"):

        @flow
        def watched() -> None:
            with Checkpointer(config_of(run_dir)) as ckpt, RunPages(ckpt, "leased", 2):
                pass

        watched()
    _, pages = newest()
    row = json.loads(str(pages["leased-checkpoints"].data))[0]
    assert r"leased by !\[x\](http\://e.vil) \<b\>" in row["kept because"]
