"""Processes to be killed, stopped and continued: forked from one that has imported torch, which takes seconds."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_PR_SET_PDEATHSIG = 1
# One for all: a second list of modules would replace the first.
forking = multiprocessing.get_context("forkserver")
forking.set_forkserver_preload(
    [
        "s3fs",
        "pandas",  # where it is installed, Arrow imports it with the first array of Python values
        "ckpt_tasks.storage.objects",
        "tests.crash.plain_loop",
        "tests.crash.zombie",
        "tests.ranks.victims",
        "tests.support.frozen",
    ]
)


class Child:
    """Run `main(arguments)` in a process of its own; what it prints goes to the file `output`.

    As a context manager it leaves no process behind.
    """

    def __init__(self, main: Callable[[Sequence[str]], None], arguments: Sequence[str], output: Path):
        self.output = output
        # It may be killed before it opens its own: what the one before it said is not what it says.
        output.unlink(missing_ok=True)
        self._process = forking.Process(target=_run, args=(main, [*arguments], output), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.alive:
            self._process.kill()
        self._process.join()
        if error is not None:
            error.add_note(f"The child printed: {self.said()[-4000:]}")

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 120) -> int:
        """Return the exit status, negative for a signal's number; raise AssertionError where it does not end."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"process {self.pid} does not end"
        return self._process.exitcode

    @property
    def stopped(self) -> bool:
        """Whether SIGSTOP holds it."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def until(self, true: Callable[[], bool], timeout_s: float = 120) -> bool:
        """Wait until something holds; return whether it does, False also where the process ends before."""
        deadline = time.monotonic() + timeout_s
        while not true():
            if not self.alive:
                return true()
            assert time.monotonic() < deadline, "what is waited for does not happen"
            time.sleep(0.002)
        return True


class Forked(subprocess.Popen[Any]):
    """`python -m MODULE …` as a fork of a process that has imported torch, instead of a start that takes seconds.

    Every other command is started. What a fork prints is its `stderr`; its hash seed is not that of its environment.
    """

    def __init__(self, command: Any, **options: Any):
        self._child: Child | None = None
        if [*command[:2]] != [sys.executable, "-m"]:
            super().__init__(command, **options)
            return
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        words = [json.dumps(dict(options["env"])), *command[2:]]
        self._child = Child(_be_module, words, Path(self._folder.name, "said"))
        self.args, self.pid, self.returncode = command, self._child.pid, None
        self._into: Any = options.get("stderr")
        self.stdin = self.stdout = self.stderr = None

    def poll(self) -> int | None:
        if self._child is None:
            return super().poll()
        if self.returncode is None and not self._child.alive:
            self.returncode, self._said = self._child.wait(), self._child.said()
            self._folder.cleanup()
            if hasattr(self._into, "name"):
                Path(self._into.name).write_text(self._said)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._child is None:
            return super().wait(timeout)
        with suppress(AssertionError):
            self._child.wait(600 if timeout is None else timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 600)
        return status

    def communicate(self, *given: Any, **more: Any) -> tuple[Any, Any]:
        if self._child is None:
            return super().communicate(*given, **more)
        self.wait()
        return "", self._said


def _be_module(arguments: Sequence[str]) -> None:
    environment, module, *words = arguments
    os.environ |= json.loads(environment)
    sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__")


def _run(main: Callable[[Sequence[str]], None], arguments: list[str], output: Path) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # also where this is stopped
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(arguments)
    sys.stdout.flush()
