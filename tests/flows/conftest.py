"""Prefect for the tests: one harness for flows in this process, one real server for flows in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from ckpt_tasks.orchestration.isolation import keep_prefect_out_of_forks, keep_threads_out_of_streams
from tests.servers.process import free_port

PREFECT = str(Path(sys.prefix, "bin", "prefect"))


@pytest.fixture(scope="session")
def harness() -> Iterator[None]:
    """Run flows of this process against a server and a database of the test session."""
    _keep_prefect_out_of_later_tests()
    # Tasks are called without a flow here, which Prefect warns of: it has no run to file the log under.
    quiet = {PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}
    with prefect_test_harness(server_startup_timeout=120), temporary_settings(quiet):
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a real server; yield the environment with which a process uses it."""
    home = tmp_path_factory.mktemp("prefect-server")
    port = free_port()
    environment = {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    command = [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until_healthy(environment["PREFECT_API_URL"], process, home / "server.log")
        yield environment
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def client(server: dict[str, str]) -> Iterator[SyncPrefectClient]:
    """Return a client of the real server, which this process is then configured for."""
    _keep_prefect_out_of_later_tests()
    with temporary_settings({PREFECT_API_URL: server["PREFECT_API_URL"]}), get_client(sync_client=True) as found:
        EventsWorker.drain_all()  # one that has begun goes on sending to the server that it began with
        yield found
        EventsWorker.drain_all()


def _keep_prefect_out_of_later_tests() -> None:
    """Let later tests of this process fork, and draw from Python's `random`, as if Prefect had no threads."""
    keep_prefect_out_of_forks()
    keep_threads_out_of_streams()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if process.poll() is not None:
            break
        try:
            with urlopen(f"{url}/health", timeout=10):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
