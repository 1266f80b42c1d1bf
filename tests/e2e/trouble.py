"""A small program that gets into trouble where a test wants it to, once, or for ever."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from pathlib import Path

import torch

from tests.support.tiny import Tiny


class Trouble(Tiny):
    """In step `at`, `what` happens after backward and before the optimizer's step.

    "raise", "segfault", "memory" (takes all that there is; at most 1 GiB more may be had) or "terminate" (of this
    process): once, unless `marker` is "": the file of that name is there afterwards. With "wait" the step takes until
    somebody has made that file, and with "heal" it raises until then. Every step that is completed is a line of the
    file `trace`.
    """

    def __init__(self, *, trace: str, step_s: float = 0.0, what: str = "", at: int = 0, marker: str = ""):
        super().__init__(step_s=step_s)
        self._what, self._at, self._marker = what, at, marker
        self._trace = trace

    def train_step(self) -> dict[str, float]:
        metrics = super().train_step()
        with open(self._trace, "a") as trace:
            trace.write(f"{time.time()} {os.getpid()} {int(self.state['steps'])} {_memory_bytes()}\n")
        return metrics

    def _interfere(self, step: int) -> None:
        if step == self._at:
            self._get_into_it()

    def _get_into_it(self) -> None:
        if self._what == "wait":
            while not Path(self._marker).exists():
                time.sleep(0.05)
        elif self._what == "heal":
            if not Path(self._marker).exists():
                raise RuntimeError(f"injected in step {self._at}")
        elif self._marker:
            if Path(self._marker).exists():
                return
            Path(self._marker).touch()
        if self._what == "raise":
            raise RuntimeError(f"injected in step {self._at}")
        if self._what == "segfault":
            ctypes.string_at(0)
        elif self._what == "memory":
            _take_all_memory()
        elif self._what == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)


def _memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _take_all_memory() -> None:
    """Take memory until the system says no; C++ then aborts or Python raises, as where there is a limit."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()  # addresses, not memory
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    held = []
    while True:
        held.append(torch.ones(1 << 24))
