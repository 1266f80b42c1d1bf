"""Processes to be killed, stopped and continued: forked from one that has imported torch, which takes seconds."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.interpreters import Process
from tests.support.waiting import until


class Child:
    """Run `main(arguments)` in a process of its own; what it prints goes to the file `output`.

    As a context manager it leaves no process behind.
    """

    def __init__(self, main: Callable[[Sequence[str]], None], arguments: Sequence[str], output: Path):
        self.output = output
        # It may be killed before it opens its own: what the one before it said is not what it says.
        output.unlink(missing_ok=True)
        self._process = Process(_run, (main, [*arguments], output))
        self._process.start()
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        until(lambda: true() or not self.alive, timeout_s, pause_s=0.002)
        return true()


def _run(main: Callable[[Sequence[str]], None], arguments: list[str], output: Path) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    assert logging.lastResort is not None
    logging.getLogger("ckpt_tasks").addHandler(logging.lastResort)  # Warnings on stderr as ever; no line of a start.
    main(arguments)
