"""Processes to be killed, stopped and continued: forked from one that has imported torch, which takes seconds."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_PR_SET_PDEATHSIG = 1
# One for all: a second list of modules would replace the first.
forking = multiprocessing.get_context("forkserver")
forking.set_forkserver_preload(
    [
        "pytest",
        "hypothesis",
        "s3fs",
        "pandas",  # where it is installed, Arrow imports it with the first array of Python values
        "ckpt_tasks.storage.objects",
        "tests.crash.plain_loop",
        "tests.crash.zombie",
        "tests.checkpoint.ranks.victims",
        "tests.support.cli_runs",
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


def _run(main: Callable[[Sequence[str]], None], arguments: list[str], output: Path) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # also where this is stopped
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    assert logging.lastResort is not None
    logging.getLogger("ckpt_tasks").addHandler(logging.lastResort)  # Warnings on stderr as ever; no line of a start.
    main(arguments)
    sys.stdout.flush()
