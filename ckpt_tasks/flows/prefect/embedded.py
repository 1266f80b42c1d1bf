"""Prefect's embedded server, which lives exactly as long as the process that needs it.

If no API is configured, Prefect starts a server as a child process. A signal to the process group (Ctrl-C in a
terminal, `timeout`, a batch system, systemd) then ends that child first, and the flow repeats requests to it for
minutes. After SIGKILL of this process the child runs for ever and keeps this process's output open. So we start the
server ourselves: in a separate session, with the signals blocked that only this process must handle, and with its
output in a file. The server ends when its parent has ended. All clients find it as the API of the settings.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
import time
from contextlib import closing, suppress
from importlib.resources import files
from pathlib import Path

import httpx
from prefect.context import refresh_global_settings_context
from prefect.settings import Settings, get_current_settings

from ckpt_tasks.errors import SiteError
from ckpt_tasks.flows.prefect.server_process import LOG, PASSWORD, ServerProcess, take_prepared

# Prefect's own 20 s are too short for a busy machine, and for the first start, which creates the database.
_PATIENCE_S = 120.0
_LOOK_S = 0.2  # Between two requests, if the server resets the first one.

TABLES = "database.sql"  # What the migrations of Prefect 3.8.8 make; they take 5 to 10 s, most of the first start.

_started: list[ServerProcess] = []


def begin_embedded_server() -> bool:
    """Start Prefect's embedded server if the settings ask for one; return True if this process has one.

    The server becomes the API of this process and its children, with a new password, and writes to
    `embedded-server.log` in Prefect's home. It ends with this process, even after SIGKILL; a signal to the process
    group does not reach it. `start_embedded_server` waits for it.
    """
    settings, servers = get_current_settings(), sys.modules.get("prefect.server.api.server")
    runs = servers is not None and servers.SubprocessASGIServer().running  # Prefect itself has started one.
    needed = not (runs or settings.api.url) and settings.server.ephemeral.enabled
    prepared = take_prepared(settings.home if needed else None)
    if not needed:
        return bool(_started)
    make_database(settings)
    server = prepared or ServerProcess.begin(settings.home, settings.to_environment_variables(exclude_unset=True))
    server.serve()
    os.environ |= {"PREFECT_API_URL": server.url, **dict.fromkeys(PASSWORD, server.password)}
    refresh_global_settings_context()
    _started.append(server)
    return True


def make_database(settings: Settings) -> None:
    """Give a home without a database one with the tables of Prefect 3.8.8, which the server migrates to its own.

    Does nothing if the settings name another database, or if the file system has no hard links.
    """
    database, url = settings.home / "prefect.db", settings.server.database.connection_url
    if url is None or url.get_secret_value() != f"sqlite+aiosqlite:///{database}" or database.exists():
        return
    settings.home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=settings.home) as place:
        made = Path(place, database.name)
        with closing(sqlite3.connect(made)) as new:
            new.executescript(files(__package__).joinpath(TABLES).read_text(encoding="utf-8"))
        with suppress(OSError):  # Another process has made the database, or there are no links.
            database.hardlink_to(made)


def start_embedded_server() -> None:
    """Start the embedded server as `begin_embedded_server` does, if needed, and wait until it answers.

    Raises SiteError if the server does not answer.
    """
    if not begin_embedded_server():
        return
    settings, deadline_s = get_current_settings(), time.monotonic() + _PATIENCE_S
    while (error := _first_error(f"{settings.api.url}/health")) is not None:
        # A server that lives may reset a connection which waited for it: ask again.
        ended = _started[-1].process.poll() is not None
        if ended or time.monotonic() > deadline_s or not isinstance(error, httpx.NetworkError | httpx.ProtocolError):
            status = f"it ended with status {_started[-1].process.returncode}" if ended else str(error)
            hint = f"Its log is {settings.home / LOG}."
            raise SiteError(f"Prefect's embedded server does not start: {status}", hint=hint) from error
        time.sleep(_LOOK_S)


def _first_error(url: str) -> httpx.HTTPError | None:
    """Return why a server does not answer, None if it does."""
    try:
        httpx.get(url, timeout=_PATIENCE_S, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        return error
    return None
