"""Prefect's embedded server, made to live exactly as long as the process that needs it.

Where no API is configured, Prefect starts a server as a child. Left alone, a Ctrl-C in a terminal ends that child
first, and the flow then waits more than a minute for an answer and reports a lost connection; after SIGKILL or SIGTERM
the child lives on for ever, with this process' output still open, so that a reader of it waits for ever as well
[both measured with 3.8.8]. So we start the same server ourselves, a moment before Prefect would.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import get_current_settings

__all__ = ["start_embedded_server"]

_PATIENCE_S = 120  # Prefect's own 20 s are too few for a busy machine, and for the first start with its new database

# Waits until either process has ended, then ends the second one: by descriptors, as a process id may be used again.
_WATCH = """
import os, select, signal, sys
server = os.pidfd_open(int(sys.argv[2]))
try:
    select.select([os.pidfd_open(int(sys.argv[1])), server], [], [])
except ProcessLookupError:
    pass
try:
    signal.pidfd_send_signal(server, signal.SIGTERM)
except ProcessLookupError:
    pass
"""


def start_embedded_server() -> bool:
    """Start Prefect's embedded server if the settings ask for one; Prefect finds it, and stops it at exit.

    It gets no Ctrl-C, writes to `embedded-server.log` in Prefect's home, and ends with this process however that ends
    (on Linux). To be called in the main thread. Returns whether a server was started.
    """
    settings = get_current_settings()
    if settings.api.url or not settings.server.ephemeral.enabled:
        return False
    server = SubprocessASGIServer()
    if server.running:
        return False
    settings.home.mkdir(parents=True, exist_ok=True)
    with _ctrl_c_blocked(), _output_to(settings.home / "embedded-server.log"):
        server.start(timeout=_PATIENCE_S)
    if server.server_process is not None and hasattr(os, "pidfd_open"):
        command = [sys.executable, "-I", "-S", "-c", _WATCH, str(os.getpid()), str(server.server_process.pid)]
        nothing = subprocess.DEVNULL
        subprocess.Popen(command, start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing)
    return True


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Block SIGINT for the children that are started meanwhile: they inherit the mask, and keep it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Send the output of the children that are started meanwhile to a file; Prefect offers no other way."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        yield
    finally:
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for descriptor in (*kept, log):
            os.close(descriptor)
