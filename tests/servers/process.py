"""Start a server as a process of its own, wait until it answers, stop it; none outlives a killed test run."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

LAUNCHER = Path(__file__).with_name("tied.py")
# Below the ports that the kernel gives to outgoing connections: one of those cannot take the port before the server.
_PORTS = range(20_000, 32_000)
# Not the generator that a test seeds: workers that choose alike would meet on every port.
_dice = random.SystemRandom()
_KEPT = 64  # who asks for a port listens on it before so many more are asked for
_taken = deque[socket.socket]()  # names that the kernel forgets when they are closed


Server = TypeVar("Server")


class NotProvisionedError(Exception):
    """The server's program is not there; the message says which `make` target brings it."""


class NotReadyError(Exception):
    """The server does not answer yet."""


class StartError(RuntimeError):
    """The server ended, or never answered; the message ends with what it wrote."""


def free_port() -> int:
    """Return a port on which nothing listens now, and that no other process of tests gets for a while."""
    while True:
        port = _dice.choice(_PORTS)
        ours = socket.socket(socket.AF_UNIX)
        try:
            ours.bind(f"\0ckpt-tasks-test-port-{port}")
        except OSError:
            ours.close()
            continue
        _taken.append(ours)
        if len(_taken) > _KEPT:
            _taken.popleft().close()
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def token() -> str:
    """Return a secret that no other server on this machine has."""
    return f"{_dice.getrandbits(96):024x}"


@contextmanager
def tied(
    command: Iterable[object], *, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that dies with this process, and with this thread; on leaving it is killed: it keeps nothing."""
    launched = [sys.executable, "-I", str(LAUNCHER), str(os.getpid()), *map(str, command)]
    with log.open("ab") as out:
        process = subprocess.Popen(
            launched, env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(ready: Callable[[], None], process: subprocess.Popen[bytes], log: Path, *, timeout_s: float) -> None:
    """Call `ready` until it raises NotReadyError no more; StartError if the process ends first or the time is over."""
    deadline = time.monotonic() + timeout_s
    reason = ""
    while process.poll() is None and time.monotonic() < deadline:
        try:
            ready()
        except (NotReadyError, OSError) as error:
            reason = repr(error)
            time.sleep(0.02)
        else:
            return
    written = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    raise StartError(f"exit status {process.poll()}, {reason}, {written}")


@contextmanager
def on_free_port(start: Callable[[int], AbstractContextManager[Server]], *, attempts: int = 3) -> Iterator[Server]:
    """Enter `start(port)`, on another port if the server does not come up: this one may have been taken meanwhile."""
    with ExitStack() as stack:
        for _ in range(attempts - 1):
            try:
                server = stack.enter_context(start(free_port()))
            except StartError:
                continue
            yield server
            return
        yield stack.enter_context(start(free_port()))
