"""Prefect for the tests: one real server, for flows in this process and in processes of their own.

Prefect is imported by the first test that asks for it: this file is a plugin, which every run of the tests imports.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest

from ckpt_tasks.flows.prefect.isolation import keep_prefect_out_of_forks, keep_threads_out_of_streams
from tests.servers.process import free_port

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

# What it does every five seconds, and no test asks for: a third of its computing while nothing happens.
_IDLE = ("LATE_RUNS", "PAUSE_EXPIRATIONS", "CLEANUP_RECONCILER")
PREFECT = str(Path(sys.prefix, "bin", "prefect"))


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a home whose database has every table, which Prefect's own migrations take 10 s for. Copy it."""
    from prefect.settings import PREFECT_HOME, get_current_settings, temporary_settings

    from ckpt_tasks.flows.prefect.embedded import make_database

    made = tmp_path_factory.mktemp("prefect-home")
    with temporary_settings({PREFECT_HOME: made}):
        make_database(get_current_settings())
    assert (made / "prefect.db").exists()
    return made


@pytest.fixture(scope="session")
def server(prefect_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a real server; yield the environment with which a process uses it."""
    with own_server(prefect_home, tmp_path_factory.mktemp("prefect-server")) as (environment, _):
        yield environment


@contextmanager
def own_server(prefect_home: Path, home: Path) -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    """Start a real server in `home`; yield the environment with which a process uses it, and its process."""
    shutil.copytree(prefect_home, home, dirs_exist_ok=True)
    port = free_port()
    environment = {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        **{f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in _IDLE},
    }
    command = [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until_healthy(environment["PREFECT_API_URL"], process, home / "server.log")
        yield environment, process
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")  # not longer: other tests count on it that no server is configured
def harness(server: dict[str, str]) -> Iterator[None]:
    """Run flows of this process against the session's server."""
    from prefect.context import _temporary_global_settings_context, get_settings_context
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW, temporary_settings

    _keep_prefect_out_of_later_tests()
    # Tasks are called without a flow here, which Prefect warns of: it has no run to file the log under.
    quiet = {PREFECT_API_URL: server["PREFECT_API_URL"], PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}
    # Threads that are not copies of this one's context see the settings too, as in a process that is configured.
    with temporary_settings(quiet), _temporary_global_settings_context(get_settings_context()):
        yield
        APILogWorker.instance().drain()
        EventsWorker.drain_all()


@pytest.fixture
def client(server: dict[str, str]) -> Iterator[SyncPrefectClient]:
    """Return a client of the real server, which this process is then configured for."""
    from prefect.client.orchestration import get_client
    from prefect.events.worker import EventsWorker
    from prefect.settings import PREFECT_API_URL, temporary_settings

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
