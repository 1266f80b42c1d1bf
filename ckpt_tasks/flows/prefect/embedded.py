"""Prefect's embedded server, which lives exactly as long as the process that needs it.

If no API is configured, Prefect starts a server as a child process. A signal to the process group (Ctrl-C in a
terminal, `timeout`, a batch system, systemd) then ends that child first, and the flow repeats requests to it for
minutes. After SIGKILL of this process the child runs for ever and keeps this process's output open. So we start the
server ourselves: in a separate session, with the signals blocked that only this process must handle, and with its
output in a file. The server ends when its parent has ended. All clients find it as the API of the settings.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from importlib.resources import files
from pathlib import Path

import httpx
import prefect
from prefect.context import refresh_global_settings_context
from prefect.settings import Settings, get_current_settings

from ckpt_tasks.checkpoint.interrupt import stop_signals
from ckpt_tasks.errors import SiteError

# Prefect's own 20 s are too short for a busy machine, and for the first start, which creates the database.
_PATIENCE_S = 120.0
_LOOK_S = 0.2  # Between two requests, if the server resets the first one.

_PASSWORD = ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING")  # One for the server, one for its clients.
_LOG = "embedded-server.log"
TABLES = "database.sql"  # What the migrations of Prefect 3.8.8 make; they take 5 to 10 s, most of the first start.

# Arguments: the parent's id, the descriptor of the socket, and the URL, which is only for readers of process lists.
# When the parent has ended, a server that was made gets 30 s to shut down.
_SERVE = """
import os, socket, sys, threading, time
parent, server = int(sys.argv[1]), None
def end_with_the_parent():
    while os.getppid() == parent:
        time.sleep(0.2)
    if server is not None:
        server.should_exit = True
        time.sleep(30)
    os._exit(0)
threading.Thread(target=end_with_the_parent, daemon=True).start()
import uvicorn
from prefect.server.api.server import create_app
server = uvicorn.Server(uvicorn.Config(create_app, factory=True, log_level="error", lifespan="on"))
server.run([socket.socket(fileno=int(sys.argv[2]))])
"""

_started: list[subprocess.Popen[bytes]] = []


def begin_embedded_server() -> bool:
    """Start Prefect's embedded server if the settings ask for one; return True if this process has one.

    The server becomes the API of this process and its children, with a new password, and writes to
    `embedded-server.log` in Prefect's home. It ends with this process, even after SIGKILL; a signal to the process
    group does not reach it. `start_embedded_server` waits for it.
    """
    settings, servers = get_current_settings(), sys.modules.get("prefect.server.api.server")
    runs = servers is not None and servers.SubprocessASGIServer().running  # Prefect itself has started one.
    if runs or settings.api.url or not settings.server.ephemeral.enabled:
        return bool(_started)
    settings.home.mkdir(parents=True, exist_ok=True)
    make_database(settings)
    # Other users of this host can reach the server's port: without a password they could read our database.
    password = secrets.token_urlsafe(32)
    own = {
        "PREFECT_UI_ENABLED": "0",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "0",
        "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "0",  # A block registers its type when it is saved.
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
    }
    given = settings.to_environment_variables(exclude_unset=True)
    environment = {**os.environ, **own, **given, **dict.fromkeys(_PASSWORD, password)}
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        open(os.open(settings.home / _LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as log,
    ):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        command = [sys.executable, "-c", _SERVE, str(os.getpid()), str(listener.fileno()), url]
        # systemd and others signal every process of a job. The server inherits the mask.
        blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *stop_signals()}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            server = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.environ |= {"PREFECT_API_URL": url, **dict.fromkeys(_PASSWORD, password)}
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
        ended = _started[-1].poll() is not None
        if ended or time.monotonic() > deadline_s or not isinstance(error, httpx.NetworkError | httpx.ProtocolError):
            status = f"it ended with status {_started[-1].returncode}" if ended else str(error)
            hint = _hint(settings.home)
            raise SiteError(f"Prefect's embedded server does not start: {status}", hint=hint) from error
        time.sleep(_LOOK_S)


def _hint(home: Path) -> str:
    """Say what to do about a server that does not start."""
    log = home / _LOG
    if b"locate revision" not in log.read_bytes():
        return f"Its log is {log}."
    return (
        f"A newer Prefect has used the database {home / 'prefect.db'}: take that Prefect here too, or another home, as "
        f"in PREFECT_HOME={home}-{prefect.__version__}."
    )


def _first_error(url: str) -> httpx.HTTPError | None:
    """Return why a server does not answer, None if it does."""
    try:
        httpx.get(url, timeout=_PATIENCE_S, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        return error
    return None
