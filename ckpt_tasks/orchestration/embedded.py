"""Prefect's embedded server, which lives exactly as long as the process that needs it.

If no API is configured, Prefect starts a server as a child process. Ctrl-C in a terminal then ends that child first;
the flow waits more than a minute for an answer and reports a lost connection. After SIGKILL or SIGTERM the child runs
on for ever and keeps this process's output open, so that a reader of the output waits for ever, too (both measured with
3.8.8). So we start the same server ourselves, just before Prefect would.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prefect.context import refresh_global_settings_context
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import get_current_settings

from ckpt_tasks.checkpoint.interrupt import stop_signals
from ckpt_tasks.process.processes import fill_standard_descriptors, start_thread

# Prefect's own 20 s are too short for a busy machine, and for the first start, which creates the database.
_PATIENCE_S = 120

_LOOK_EVERY_S = 0.02

_PASSWORD = ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING")  # For the server, and for its clients.

# Wait until this process or the server has ended, then end the server. Use descriptors: a process id can be reused.
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

    It has its own password, in the environment of this process. Ctrl-C does not reach the server. It writes to
    `embedded-server.log` in Prefect's home. On Linux it ends with this process, even after SIGKILL. Call this in the
    main thread. Returns whether a server was started.
    """
    settings = get_current_settings()
    if settings.api.url or not settings.server.ephemeral.enabled:
        return False
    server = SubprocessASGIServer()
    if server.running:
        return False
    settings.home.mkdir(parents=True, exist_ok=True)
    _ask_for_a_password()
    with _ctrl_c_blocked(), _output_to(settings.home / "embedded-server.log"), _watched(server):
        server.start(timeout=_PATIENCE_S)
    return True


def _ask_for_a_password() -> None:
    """Give this process and its server a password: other users of this host can reach its port, and so our database."""
    password = secrets.token_urlsafe(32)
    os.environ |= dict.fromkeys(_PASSWORD, password)
    refresh_global_settings_context()


@contextmanager
def _watched(server: SubprocessASGIServer) -> Iterator[None]:
    """Watch the server's process from its start on, since this process may be killed while the server starts."""
    started = threading.Event()
    thread = start_thread(_watch, server, started, name="ckpt-server")
    try:
        yield
    finally:
        started.set()
        thread.join()


def _watch(server: SubprocessASGIServer, started: threading.Event) -> None:
    watched, last = None, not hasattr(os, "pidfd_open")
    while not last:
        # Check again after the start: if the port is taken, another process has it.
        last = started.wait(_LOOK_EVERY_S)
        process = server.server_process
        if process is not None and process is not watched:
            command = [sys.executable, "-I", "-S", "-c", _WATCH, str(os.getpid()), str(process.pid)]
            nothing = subprocess.DEVNULL
            subprocess.Popen(command, start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing)
            watched = process


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Block Ctrl-C and a scheduler's signals for child processes that the block starts: they inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *stop_signals()})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Redirect the output of child processes that the block starts to a file; Prefect offers no other way."""
    fill_standard_descriptors()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):  # The reader has closed the pipe, or the disk is full.
            stream.flush()
    saved = os.dup(1), os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        yield
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for descriptor in (*saved, log):
            os.close(descriptor)
