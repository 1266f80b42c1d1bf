"""Prefect's server in the background: `python -m deployments.server` starts it and waits until it answers.

`prefect server start --background` connects its server to two pipes and exits. Nothing reads them, so the server dies
at the first line that it writes (3.8.8). Here the server writes to `server.log` in Prefect's home and has its own
session; `prefect server stop` ends it. Concurrency leases are stored in files, which survive a restart of the server.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from prefect.settings import get_current_settings

from ckpt_tasks.errors import SiteError
from ckpt_tasks.flows.prefect.embedded import make_database

_PATIENCE_S = 180  # The first start creates the database.
_LOOK_S = 0.5
_MOST_BYTES = 1000
_LEASES = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
_PAGE_ASKS = "PREFECT_SERVER_UI_API_URL"


def start_server(host: str, port: int, options: Sequence[str] = (), password: str = "") -> int | None:
    """Start a server and return its process id once it answers; None if a server answers already. Raises SiteError.

    With a `password` ("user:secret") the server answers only requests with it. It reads the password from its
    environment, which no other user can read.
    """
    url = api_url(host, port)
    if answers(url):
        return None
    settings = get_current_settings()
    make_database(settings)
    settings.home.mkdir(parents=True, exist_ok=True)
    command, environment = server_start(host, port, options, password)
    log_path = settings.home / "server.log"
    server, begin = start_apart(command, log_path, environment)
    if not await_answer(url, lambda: server.poll() is None):
        if server.returncode is not None:
            raise SiteError(f"the server ended with status {server.returncode}:\n{end_of(log_path, begin)}")
        server.terminate()
        raise SiteError(f"the server did not answer at {url} within {_PATIENCE_S} s; see {log_path}")
    (settings.home / "server.pid").write_text(str(server.pid))  # `prefect server stop` reads this file.
    return server.pid


def await_answer(url: str, lives: Callable[[], bool] = lambda: True) -> bool:
    """Wait until a server answers; return False if it does not in time, or no longer `lives`."""
    deadline = time.monotonic() + _PATIENCE_S
    while not answers(url):
        if not lives() or time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def server_start(
    host: str, port: int, options: Sequence[str] = (), password: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves in the foreground, and its environment, which no other user can read."""
    # No usage data goes to Prefect, unless the caller's environment says so.
    settings, environment = get_current_settings(), {"PREFECT_SERVER_ANALYTICS_ENABLED": "0", **os.environ}
    if "lease_storage" not in settings.server.concurrency.model_fields_set:
        environment[_LEASES] = "prefect.server.concurrency.lease_storage.filesystem"
    if "api_url" not in settings.server.ui.model_fields_set and not settings.api.url:
        # The page would otherwise use the default port, whatever the command line says (3.8.8).
        environment[_PAGE_ASKS] = api_url(host, port)
    if password:
        environment |= {"PREFECT_SERVER_API_AUTH_STRING": password, "PREFECT_API_AUTH_STRING": password}
    serving = [sys.executable, "-m", "ckpt_tasks.flows.site.serving", "server", "start"]
    return [*serving, "--host", host, "--port", str(port), *options], environment


def start_apart(
    command: Sequence[str], log_path: Path, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a process that outlives its terminal; return it, and the offset in the log where its output begins."""
    with log_path.open("ab") as log:
        begin = log.tell()
        nothing = subprocess.DEVNULL
        return subprocess.Popen(
            command, env=environment, stdin=nothing, stdout=log, stderr=log, start_new_session=True
        ), begin


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the server from the command line; return the exit status."""
    api = get_current_settings().server.api
    parser = argparse.ArgumentParser(
        prog="python -m deployments.server",
        description="Start Prefect's server in the background and wait until it answers.",
        epilog="Further options are those of `prefect server start`. `prefect server stop` ends the server.",
    )
    parser.add_argument("--host", default=api.host, help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", default=api.port, type=int, help="port to listen on (default: %(default)s)")
    known, options = parser.parse_known_args(arguments)
    try:
        started = start_server(known.host, known.port, options)
    except SiteError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 (a command line prints)
        return 1
    url = api_url(known.host, known.port)
    message = "The server answers" if started is not None else "A server answers already"
    print(f"{message} at {url}.")  # noqa: T201
    if (get_current_settings().api.url or "").rstrip("/") != url:
        print(f"Clients use another server: export PREFECT_API_URL={url}")  # noqa: T201
    return 0


def api_url(host: str, port: int) -> str:
    """Return the API's address for clients on this host."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 (compared, not bound)
    return f"http://{reached}:{port}/api"


def local_url(port: int | None) -> str:
    """Return the URL of the API that a server of this machine has at `port`, or at Prefect's own."""
    api = get_current_settings().server.api
    return api_url(api.host, port or api.port)


def answers(url: str) -> bool:
    """Return True if a Prefect server answers at this API; raise SiteError if another program does."""
    try:
        with urlopen(f"{url}/health", timeout=5) as answer:  # noqa: S310 (http, from our own host and port)
            said: object = json.loads(answer.read(_MOST_BYTES))
    except HTTPError as error:
        said = error.code
    except (HTTPException, ValueError) as error:
        said = error
    except OSError:
        return False
    if said is not True:
        raise SiteError(
            f"another program listens there: {url}/health answers {str(said)!r:.80}", hint="Choose another --port."
        )
    return True


def make_password(home: Path) -> Path:
    """Return the file with the password of the site in `home`, readable only by its owner; create it if missing."""
    path = home / "ckpt-up.auth"
    with suppress(FileNotFoundError, SiteError):
        if path.stat().st_mode & 0o077 == 0 and read_password(path):
            return path
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    with open(new, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(f"ckpt:{secrets.token_urlsafe(32)}\n")
    new.replace(path)
    return path


def read_password(path: Path) -> str:
    """Return the password in a file of `make_password`; raise SiteError if there is none."""
    try:
        return path.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise SiteError(
            f"the site's password cannot be read: {error}", hint="ckpt down, then ckpt up makes another one."
        ) from error


def end_of(log_path: Path, begin: int) -> str:
    """Return the last lines of a log, but none from before byte `begin`."""
    with log_path.open("rb") as log:
        log.seek(begin)
        return log.read()[-2000:].decode("utf-8", "replace").strip()
