"""Processes of Python, forked from one that has imported torch, which takes seconds: the nursery.

A process and those that it starts share one, which begins at the first request: so do the workers of a test run.

`Python` and `Forked` are programs. They end as an interpreter does: they print an uncaught error, join threads, run the
exit functions, and free what the main module holds. An interpreter then takes its modules apart, which costs 0.6 s of
processor time in a fork: tests of the very end ask for it (`whole_end`). A `Process` calls a function, and leaves all
of that out, as multiprocessing does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import connection, context, popen_spawn_posix, reduction
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tests.support.programs import run, status_of

ROOT = Path(__file__).resolve().parents[2]
# torch._dynamo comes with the first optimizer step, fsdp with the first rank: two seconds in each child. pandas comes
# with Arrow's first array of Python values, where it is installed.
_IMPORTED = (
    *("torch.utils.data", "torch._dynamo", "torch.distributed.fsdp", "s3fs", "pandas", "pytest", "hypothesis"),
    *("ckpt_tasks.checkpoint.checkpointer", "ckpt_tasks.flows.gang.rank", "ckpt_tasks.storage.objects"),
    *("ckpt_tasks.testing", "tests.checkpoint.ranks.victims", "tests.crash.plain_loop", "tests.crash.zombie"),
    *("tests.support.cli_runs", "tests.support.gang"),
)
_PR_SET_PDEATHSIG = 1
_SHARED = "NURSERY_OF_TESTS"  # the address of the nursery that a test run shares
_started = subprocess.Popen  # for which a test may put Forked


class Python:
    """`python -c CODE …` or `python -m MODULE …` in a session of its own; a `with` leaves no process behind.

    What it prints comes from `stdout`; or all of it goes to the file `said`, if there is one.
    """

    def __init__(
        self,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        said: IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        whole_end: bool = False,
    ):
        out, into = os.pipe()
        self.stdout = os.fdopen(out, encoding="utf-8")
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (closed at the end of the block)
        self.returncode: int | None = None
        given = (into, self._stderr.fileno()) if said is None else (said.fileno(), said.fileno())
        self.pid, self.ended = fork(arguments, given, environment, pass_fds, whole_end)
        os.close(into)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # The server has waited for it, and has not said so yet.
                self.send(signal.SIGKILL)
            self.wait()
        self.stdout.close()
        self._stderr.close()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Return the exit status, negative for a signal's number."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(int(os.read(self.ended, 64)))
            os.close(self.ended)
        return self.returncode

    def ends(self, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Return what it printed and its status when it has ended, killed after a time."""
        killing = threading.Timer(timeout_s, os.killpg, (self.pid, signal.SIGKILL))
        killing.start()
        said = self.stdout.read()
        status = self.wait()
        killing.cancel()
        self._stderr.seek(0)
        return subprocess.CompletedProcess([], status, said, self._stderr.read())


class Process:
    """`target(*args)` in a session of its own; among `args` may be ends of pipes. It dies with this process."""

    DupFd = popen_spawn_posix._DupFd  # what a pipe's end becomes in a pickle

    def __init__(self, target: Callable[..., object], args: Sequence[object] = ()):
        self._call = target, args
        self._passed: list[int] = []
        self.exitcode: int | None = None

    def start(self) -> None:
        with tempfile.TemporaryFile() as call:
            context.set_spawning_popen(self)  # type: ignore[arg-type]
            try:
                call.write(reduction.ForkingPickler.dumps(self._call))
            finally:
                context.set_spawning_popen(None)
            call.seek(0)
            code, number = f"from {__name__} import called; called()", call.fileno()
            self.pid, self._ended = fork(["-c", code, number], (1, 2), None, [number, *self._passed], False)

    def duplicate_for_child(self, descriptor: int) -> int:
        """Let the child have a descriptor, under the same number."""
        self._passed.append(descriptor)
        return descriptor

    def is_alive(self) -> bool:
        self.join(0)
        return self.exitcode is None

    def kill(self) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):  # The server has waited for it, and has not said so yet.
                os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, at most for a time."""
        if self.exitcode is None and connection.wait([self._ended], timeout_s):
            self.exitcode = os.waitstatus_to_exitcode(int(os.read(self._ended, 64)))
            os.close(self._ended)


def called() -> None:
    """Be the process of a Process."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        target, args = pickle.load(file)
    status = 0
    try:
        target(*args)
    except SystemExit as error:
        status = status_of(error)
    except BaseException:  # noqa: BLE001 (as at the end of an interpreter)
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    with Python(*arguments, **options) as program:
        return program.ends()


class Forked(subprocess.Popen[Any]):
    """What stands for Popen: `python -m MODULE …` and `python -c CODE …` are forks. Every other command is started.

    Its hash seed is not that of its environment, and what it prints goes to the file that is given for its errors.
    """

    def __init__(self, command: Any, **options: Any):
        self._program: Python | None = None
        if [*command[:2]] not in ([sys.executable, "-m"], [sys.executable, "-c"]):
            super().__init__(command, **options)
            return
        given = options.get("stderr") or sys.__stderr__
        self._said: Any = given if hasattr(given, "fileno") else tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in communicate)
        more = {"environment": options.get("env"), "pass_fds": options.get("pass_fds", ())}
        self._program = Python(*command[1:], said=self._said, **more)
        self.args, self.pid, self.returncode = command, self._program.pid, None
        self.stdin = self.stdout = self.stderr = None

    def poll(self) -> int | None:
        if self._program is None:
            return super().poll()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._program is None:
            return super().wait(timeout)
        if self.returncode is None:
            if not connection.wait([self._program.ended], timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._program as ended:
                self.returncode = ended.wait()
        return self.returncode

    def communicate(self, *given: Any, **more: Any) -> tuple[Any, Any]:
        if self._program is None:
            return super().communicate(*given, **more)
        self.wait()
        with self._said:
            self._said.seek(0)
            return "", self._said.read()


def fork(
    arguments: Sequence[object],
    outputs: tuple[int, int],
    environment: Mapping[str, str] | None,
    pass_fds: Sequence[int],
    whole_end: bool,
) -> tuple[int, int]:
    """Have the nursery fork a program; return its id, and a descriptor that has its status when it has ended."""
    ended, ends = os.pipe()
    asked = [[str(word) for word in arguments], os.getcwd(), dict(environment or os.environ), [*pass_fds], whole_end]
    line = _nursery(os.getpid())
    socket.send_fds(line, [json.dumps(asked).encode()], [*outputs, ends, *pass_fds])
    os.close(ends)
    return int(line.recv(64)), ended


@cache
def _nursery(_: int) -> socket.socket:
    """Return the line to the nursery of this process, whose programs end with it."""
    if _SHARED not in os.environ:
        share()
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(f"\0{os.environ[_SHARED]}")
    return line


def share() -> None:
    """Let this process and those that it starts share a nursery, which begins at the first request."""
    os.environ[_SHARED] = address = f"ckpt-tasks-nursery-{os.getpid()}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"\0{address}")
    listening.listen(64)

    def wait() -> None:
        if select.select([listening], [], [])[0]:
            _start(listening)

    threading.Thread(target=wait, daemon=True).start()


def _start(listening: socket.socket) -> None:
    """Start the nursery, which ends with this process."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds = [there.fileno(), listening.fileno()]
    null = subprocess.DEVNULL
    command = [sys.executable, "-m", __name__, *map(str, fds)]
    process = _started(command, cwd=ROOT, pass_fds=fds, stdin=null, stdout=null)
    there.close()
    listening.close()
    atexit.register(process.wait)
    atexit.register(here.close)  # which is called first, and ends it


# ── in the nursery ───────────────────────────────────────────────────────────────────────────────────────────────


def serve(owner: socket.socket, listening: socket.socket) -> tuple[list[str], bool] | None:
    """Fork a program for each request and report how it ended; return in the program what is asked, None at the end.

    A line is a process that asks; when it ends, so do its programs.
    """
    poll, living, lines = select.poll(), dict[int, tuple[int, int, int]](), dict[int, socket.socket]()
    for each in (owner, listening):
        poll.register(each, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == owner.fileno():
                return None  # Its programs die with this process.
            if fd == listening.fileno():
                line = listening.accept()[0]
                lines[line.fileno()] = line
                poll.register(line, select.POLLIN)
                continue
            if fd in living:
                pid, ends, _ = living.pop(fd)
                poll.unregister(fd)
                with contextlib.suppress(BrokenPipeError):  # whom it would tell is gone
                    os.write(ends, str(os.waitpid(pid, 0)[1]).encode())
                os.close(fd)
                os.close(ends)
                continue
            data, fds, _, _ = socket.recv_fds(lines[fd], 1 << 20, 16)
            if not data:
                poll.unregister(fd)
                lines.pop(fd).close()
                for pid, _, asked in living.values():
                    if asked == fd:
                        os.kill(pid, signal.SIGKILL)
                continue
            into, errors, ends, *passed = fds
            if (pid := os.fork()) == 0:
                arguments, directory, environment, numbers, whole_end = json.loads(data)
                ours = [one.detach() for one in (owner, listening, *lines.values())]
                _take(fds, numbers, [*ours, *living, *(ends for _, ends, _ in living.values())])
                _begun(directory, environment)
                return arguments, whole_end
            lines[fd].send(str(pid).encode())
            for held in (into, errors, *passed):
                os.close(held)
            watch = os.pidfd_open(pid)
            living[watch] = pid, ends, fd
            poll.register(watch, select.POLLIN)


def _take(given: list[int], numbers: list[int], held: list[int]) -> None:
    """Take what is given as output and errors, and what is passed under its number; close what the nursery holds."""
    into, errors, _, *passed = given
    os.dup2(into, 1)
    os.dup2(errors, 2)
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in passed]
    for fd in (*given, *held):
        os.close(fd)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _begun(directory: str, environment: dict[str, str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    for _name in _IMPORTED:
        with contextlib.suppress(ImportError):  # of packages that are not installed everywhere
            importlib.import_module(_name)
    gc.collect()
    gc.freeze()
    _asked = serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
    if _asked is not None:
        run(*_asked)
