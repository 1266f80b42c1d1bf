"""Work behind a commit, which no save waits for: one thread that takes the newest request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ckpt_tasks.state.niceness import be_nice

__all__ = ["Background", "CancelledWorkError"]

_T = TypeVar("_T")


class CancelledWorkError(Exception):
    """The work is not wanted any more; only the thread that did it sees this."""


class Background(Generic[_T]):
    """Run `work` for the newest request, in a daemon thread that ends when there is none.

    `work` calls `check` wherever it can stop.
    """

    def __init__(self, work: Callable[[_T], None], name: str):
        self._work = work
        self._name = name
        self._changed = threading.Condition()
        self._requested: list[_T] = []
        self._running = False
        self._cancelled = False

    def request(self, argument: _T) -> None:
        """Have the work done soon; a request that still waits is dropped for this one."""
        with self._changed:
            self._requested = [argument]
            if not self._running:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._running = True

    def check(self) -> None:
        """Raise CancelledWorkError if the work that runs was cancelled."""
        if self._cancelled:
            raise CancelledWorkError

    def finish(self, limit_s: float) -> None:
        """Wait until nothing is left to do, at most `limit_s`; then cancel what is left."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._running, limit_s):
                return
        self.cancel(0)

    def cancel(self, limit_s: float) -> None:
        """Drop what waits, cancel what runs, and wait at most `limit_s` for its end."""
        with self._changed:
            self._requested = []
            self._cancelled = self._running
            self._changed.wait_for(lambda: not self._running, limit_s)

    def _run(self) -> None:
        be_nice()
        while True:
            with self._changed:
                if not self._requested:
                    self._running = self._cancelled = False
                    self._changed.notify_all()
                    return
                argument = self._requested.pop()
                self._cancelled = False
            try:
                self._work(argument)
            except CancelledWorkError:
                continue
