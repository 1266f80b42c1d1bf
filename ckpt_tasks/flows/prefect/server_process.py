"""The process of Prefect's embedded server, which begins before this process can import Prefect.

Its imports take as long as ours. So `ckpt train` begins it first of all, and says `serve` or `end` to it once it has
read Prefect's settings. This module imports no Prefect.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ckpt_tasks.checkpoint.interrupt import stop_signals

LOG = "embedded-server.log"
PASSWORD = ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING")  # One for the server, one for its clients.
_OWN = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "0",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "0",  # A block registers its type when it is saved.
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
}

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
if not sys.stdin.buffer.read(1):
    sys.exit()
server = uvicorn.Server(uvicorn.Config(create_app, factory=True, log_level="error", lifespan="on"))
server.run([socket.socket(fileno=int(sys.argv[2]))])
"""

_prepared: list[ServerProcess] = []


@dataclass(frozen=True)
class ServerProcess:
    """A server's process in a home of Prefect, and how clients will reach it. It serves when it is told to.

    It runs in a session of its own, ends with this process, even after SIGKILL, and writes to a file in the home.
    """

    home: Path
    url: str
    password: str
    process: subprocess.Popen[bytes]

    @classmethod
    def begin(cls, home: Path, settings: dict[str, str]) -> Self:
        """Begin the process, with these variables of Prefect above those of the environment; it imports, and waits."""
        home.mkdir(parents=True, exist_ok=True)
        # Other users of this host can reach the server's port: without a password they could read our database.
        password = secrets.token_urlsafe(32)
        environment = {**_OWN, **os.environ, **settings, **dict.fromkeys(PASSWORD, password)}
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            open(os.open(home / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as log,
        ):
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
            command = [sys.executable, "-c", _SERVE, str(os.getpid()), str(listener.fileno()), url]
            # systemd and others signal every process of a job. The server inherits the mask.
            blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *stop_signals()}
            before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
            try:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return cls(home, url, password, process)

    def serve(self) -> None:
        """Let the process serve; does nothing if it has ended."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(b"\n")
            self.process.stdin.close()

    def end(self) -> None:
        """End the process, which does not serve yet."""
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()


def prepare() -> None:
    """Begin a server's process for `take_prepared`, unless Prefect is imported or the environment names a server."""
    if "prefect" in sys.modules or "PREFECT_API_URL" in os.environ:
        return
    with suppress(OSError, RuntimeError):  # There is no home, or it is not ours: reading the settings says so.
        home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
        _prepared.append(ServerProcess.begin(home, {}))


def take_prepared(home: Path | None) -> ServerProcess | None:
    """Return the prepared process if it is one of this home; end it otherwise. None stands for no server."""
    if not _prepared:
        return None
    prepared = _prepared.pop()
    if prepared.home == home:
        return prepared
    prepared.end()
    return None
