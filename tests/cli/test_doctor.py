"""`ckpt doctor`: what it makes of servers that are absent or hostile, of directories and of buckets."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from uuid import uuid4

import prefect
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.cli import app
from ckpt_tasks.cli.doctor.host import holds
from ckpt_tasks.cli.doctor.server_checks import check_prefect, clock_of
from ckpt_tasks.storage.locations import Location
from tests.servers.s3 import S3Server
from tests.support.sweeps import quick_first

FAR_S = 40.0  # between two clocks: longer than a busy machine takes for a request


@contextmanager
def answering(answers: dict[str, tuple[int, bytes]], *dates: str | None, hang: str | None = None) -> Iterator[str]:
    """Run a server that gives one answer for each path, or for the path "*"; requests for `hang` get none.

    Its answers have these dates in turn, and then always the last one.
    """
    over, turn = threading.Event(), chain(dates, repeat(dates[-1] if dates else None))

    class Answers(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            if hang is not None and path.endswith(hang):
                over.wait()  # silent until the test ends
                return
            status, body = answers.get(path, answers.get("*", (404, b"{}")))
            self.send_response_only(status)
            if (date := next(turn)) is not None:
                self.send_header("Date", date)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_POST = do_HEAD = _answer  # noqa: N815 (the names of http.server)

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/api"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()


ADDRESS = "http://me:HUSH@127.0.0.1:9/api"  # nobody listens there
HEALTHY = {"/api/health": (200, b"true"), "/api/admin/version": (200, json.dumps(prefect.__version__).encode())}


@pytest.mark.parametrize(
    ("answers", "hang", "failure"),
    quick_first(
        [
            ({}, None, "404"),
            ({"*": (500, b"boom")}, None, "500"),
            (HEALTHY, "/admin/version", "no answer within 4 s"),
            (None, None, "refused"),
            ({"/api/health": (200, b"true"), "*": (401, b"{}")}, None, "PREFECT_API_AUTH_STRING"),
            ({}, "/health", "no answer within 4 s"),
            ({"*": (200, b"<html>hello</html>")}, None, "Expecting value"),
        ],
        3,
    ),
    ids=["not found", "broken", "silent later", "nobody", "forbidden", "silent", "no API"],
)
def test_a_server_that_is_none_is_wrong(
    answers: dict[str, tuple[int, bytes]] | None, hang: str | None, failure: str
) -> None:
    """404, 500, 401, a web page, silence, nobody: it is said which, and the rest is left.

    A password in the address is not repeated.
    """
    with (
        answering(answers or {}, hang=hang) as url,
        temporary_settings({PREFECT_API_URL: ADDRESS if answers is None else url}),
    ):
        checks = check_prefect()
    assert [check.name for check in checks] == ["server", "fastapi", "sqlalchemy"]
    assert "HUSH" not in repr(checks)
    assert (checks[0].verdict, failure in checks[0].seen) == ("wrong", True), checks[0]


@pytest.mark.parametrize(
    "body", quick_first([b"[]", b"{}", b"null", b'"no"', b'[{"name": 3}]', b"[1]", b"\xff", b'{"server": 1}'], 4)
)
def test_nonsense_is_not_checked(body: bytes) -> None:
    """A server that is healthy and answers everything else with nonsense: no crash, and nothing is said to be ok."""
    with answering({**HEALTHY, "*": (200, body)}) as url, temporary_settings({PREFECT_API_URL: url}):
        checks = {check.name: check for check in check_prefect(pool="p")}
    assert checks["server"].verdict == "ok"
    assert checks["work pool"].verdict == "not checked"
    assert checks["lease storage"].verdict == "not checked"


def test_a_worker_that_is_gone_is_not_online() -> None:
    """A pool remembers its workers: one from which the server hears no more picks up no runs."""
    anything = {"id": str(uuid4()), "work_pool_id": str(uuid4()), "default_queue_id": str(uuid4())}
    pool = anything | {"name": "p", "type": "process"}
    told = {"": pool, "/workers/filter": [anything | {"name": "w", "status": "OFFLINE"}]}
    answers = {f"/api/work_pools/p{path}": (200, json.dumps(answer).encode()) for path, answer in told.items()}
    answers["/api/deployments/filter"] = (200, b"[]")
    with answering({**HEALTHY, **answers}) as url, temporary_settings({PREFECT_API_URL: url}):
        [check] = [check for check in check_prefect(pool="p") if check.name == "work pool"]
    assert (check.verdict, "workers online: 0" in check.seen) == ("wrong", True), check


def test_a_clock_by_the_date_of_an_answer() -> None:
    """Whatever else the answer is; without a date, or with nonsense, there is nothing to judge.

    A busy server that has not renewed its date is asked again.
    """
    with answering({"*": (403, b"no")}, "Tue, 01 Jan 2030 00:00:00 GMT") as url:
        ahead_s, within_s = clock_of(url)
    assert ahead_s is not None
    assert abs(ahead_s - (1893456000 - time.time())) < FAR_S
    assert within_s >= 0.5
    for date in (None, "yesterday", "Tue, 99 Jan 2030 00:00:00 GMT"):
        with answering({"*": (403, b"no")}, date) as url:
            assert clock_of(url)[0] is None
    assert clock_of("http://127.0.0.1:9")[0] is None
    past, now = "Tue, 01 Jan 2019 00:00:00 GMT", formatdate(time.time() + FAR_S, usegmt=True)
    for dates, is_behind in (((past, now), False), ((past,), True)):
        with answering({"*": (403, b"no")}, *dates) as url:
            ahead_s, _ = clock_of(url)
        assert ahead_s is not None
        assert (ahead_s < 0) is is_behind
    with answering(HEALTHY, "Tue, 01 Jan 2030 00:00:00 GMT") as url, temporary_settings({PREFECT_API_URL: url}):
        assert [check.verdict for check in check_prefect() if check.name == "clock"] == ["wrong"]


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["doctor", *arguments, "--json"])
    found = json.loads(done.stdout)
    return done.exit_code, {one["name"]: one for one in found["checks"]}


def test_without_a_server_it_looks_at_the_place(run_dir: Path) -> None:
    """No server is started; a directory where nothing is gets tried, and is gone again; exit status 0."""
    status, checks = doctor(str(run_dir / "deep"))
    assert (status, checks["server"]["verdict"], checks["store"]["verdict"]) == (0, "warning", "ok")
    assert "no run yet" in checks["store"]["seen"]
    assert not run_dir.exists()
    assert doctor()[1]["store"]["verdict"] == "not checked"


def test_a_run_that_is_there_is_read_and_not_written(run_dir: Path) -> None:
    """Its proof is in format.json, and its newest checkpoint says how much memory two snapshots take."""
    torch = pytest.importorskip("torch")
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), run_key="lm")) as ckpt:
        size_bytes = ckpt.save(1, {"w": torch.zeros(1000)}).size_bytes
    before = sorted(run_dir.rglob("*"))
    status, checks = doctor(str(run_dir))
    assert (status, checks["store"]["verdict"], "'lm'" in checks["store"]["seen"]) == (0, "ok", True)
    assert "two snapshots" in checks["memory"]["seen"]
    assert sorted(run_dir.rglob("*")) == before
    assert size_bytes > 4000
    (run_dir / "format.json").write_text("{")
    assert doctor(str(run_dir))[1]["store"]["verdict"] == "wrong"


@pytest.mark.parametrize("place", ["ftp://b/c", "s3://", "/dev/null/run", "block://no such"])
def test_what_is_no_place_is_wrong_and_said(place: str) -> None:
    """An address that leads nowhere: exit status 1, and the other checks are there all the same."""
    status, checks = doctor(place)
    assert (status, checks["store"]["verdict"]) == (1, "wrong")
    assert "memory" in checks


@pytest.mark.slow
def test_a_bucket_by_its_run(ministack: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put-if-absent is tried where no run is, and believed where one has proved it; the store's clock is compared."""
    torch = pytest.importorskip("torch")
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    place = f"s3://{bucket}/run"
    status, checks = doctor(place)
    assert (status, "fit for checkpoints" in checks["store"]["seen"]) == (0, True)
    assert checks["store's clock"]["verdict"] == "ok"
    assert ministack.client().list_objects_v2(Bucket=bucket).get("Contents", []) == []
    with Checkpointer(CheckpointConfig(checkpoint_dir=place)) as ckpt:
        ckpt.save(1, {"w": torch.zeros(10)})
    assert "were proved" in doctor(place)[1]["store"]["seen"]
    single = f"s3://{bucket}/single"
    with Checkpointer(CheckpointConfig(checkpoint_dir=Location(single, single_writer=True))) as ckpt:
        ckpt.save(1, {"w": torch.zeros(10)})
    store = doctor(single)[1]["store"]
    assert (store["verdict"], "single_writer" in store["seen"]) == ("warning", True)


def test_a_lock_is_not_read_as_a_whole(run_dir: Path) -> None:
    """A lock file of any size, a pipe and another user's file in its place cost the doctor nothing."""
    with tempfile.TemporaryDirectory(prefix="ckpt-tasks-locks-", dir="/dev/shm") as made:
        lock, url = Path(made, "lock"), str(run_dir).encode()
        lock.write_bytes(url)
        assert holds(lock, url)
        os.truncate(lock, 4 << 30)
        tracemalloc.start()
        assert holds(lock, url)  # Zeros follow the text.
        assert not holds(lock, url[:-1])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
        lock.unlink()
        os.mkfifo(lock)
        assert not holds(lock, url)
        lock.unlink()
        lock.write_bytes(url)
        if os.geteuid() == 0:
            os.chown(lock, 65534, 65534)
            assert not holds(lock, url)


def test_snapshots_in_memory_are_listed_with_their_sizes(tmp_path: Path) -> None:
    """P67: what killed runs left is listed, with what `ckpt prune --memory` would free; nothing of it is touched."""
    run_dir, gone = tmp_path / "run", tmp_path / "gone"
    for place in (run_dir, gone):
        with suppress(ZeroDivisionError), Checkpointer(CheckpointConfig(checkpoint_dir=place, step_interval=1)) as ckpt:
            ckpt.save(1, {"weights": bytes(1 << 20)})
            raise ZeroDivisionError  # an error keeps the snapshots for the next process
    before = doctor()[1]["snapshots"]
    shutil.rmtree(gone)
    after = doctor(str(run_dir))[1]["snapshots"]
    for place in (run_dir, gone):
        assert re.search(f"{place}: 1.[0-9] MiB(;|$)", before["seen"])
    assert re.search(f"{run_dir}: 1.[0-9] MiB(;|$)", after["seen"])
    assert re.search(f"{gone}: 1.[0-9] MiB, a run that is gone(;|$)", after["seen"])
    assert (after["verdict"], "ckpt prune --memory" in after["do"]) == ("warning", True)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["doctor", "train"])
def test_settings_of_prefect_that_cannot_be_read_are_said(verb: str, tmp_path: Path) -> None:
    """No traceback: the doctor goes on with its other checks, every other verb ends with an error and does nothing."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "profiles.toml").write_text("active = [")
    done = subprocess.run(
        [sys.executable, "-c", "from ckpt_tasks.cli import main; main()", verb, "--json"],
        env={**os.environ, "PREFECT_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    told = json.loads(done.stdout)
    if verb == "doctor":
        assert done.returncode == 1
        assert [check["name"] for check in told["checks"]][:3] == ["server", "store", "memory"]
        told = {"error": told["checks"][0]["seen"]}
    assert done.returncode != 0
    assert "Prefect's settings cannot be read: Invalid value" in str(told["error"])
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert [path.name for path in home.iterdir()] == ["profiles.toml"]
