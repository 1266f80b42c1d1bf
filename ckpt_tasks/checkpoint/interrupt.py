"""Hold SIGTERM and Ctrl-C back until the step is done and its checkpoint is committed."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interrupt"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupt:
    """Remember a signal until the step boundary, then hand it to whoever had it before.

    Only the main thread can set signal handlers; elsewhere this does nothing, and the process' own handlers act. A
    second Ctrl-C is handed on at once; a second SIGTERM is not, since schedulers send several.
    """

    def __init__(self) -> None:
        self.pending: int | None = None
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals over, in the main thread."""
        if threading.current_thread() is threading.main_thread() and not self._previous:
            self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def uninstall(self) -> None:
        """Give the signals back, except where another library has set its own handler since."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._note:
                # None: the handler was not set from Python and cannot be put back
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}

    def deliver(self) -> None:
        """Hand the pending signal to its previous handler; where that returns, training goes on."""
        number, self.pending = self.pending, None
        if number is None:
            return
        held = bool(self._previous)
        self.uninstall()
        signal.raise_signal(number)
        if held:
            self.install()

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.pending == number == signal.SIGINT
        self.pending = number
        if again:
            self.deliver()
