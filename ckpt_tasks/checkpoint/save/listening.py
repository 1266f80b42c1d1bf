"""Call listeners after commits, failed saves and restores, in the thread that did the work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_tasks.errors import ConfigError, StateError
from ckpt_tasks.format.layout.steps import StepMetrics
from ckpt_tasks.format.records import Checkpoint

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.restore.restore import RestoreReport

_log = logging.getLogger("ckpt_tasks")


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Functions to call after events of a run. Each function must return at once; its exceptions are only logged.

    `committed` gets the checkpoint of each durable commit. Just before this call, `measured` gets the metrics of the
    steps that the commit adds. `failed` gets step and error of a snapshot that will not be committed. `restored` gets
    the report of a restore.
    """

    committed: Callable[[Checkpoint], object] | None = None
    measured: Callable[[tuple[StepMetrics, ...]], object] | None = None
    failed: Callable[[int, BaseException], object] | None = None
    restored: Callable[[RestoreReport], object] | None = None


class Listeners:
    """Calls all listeners; logs only the first exception of each listener, and keeps calling the listener."""

    def __init__(self) -> None:
        self._all: list[Listener] = []
        self._complained: set[int] = set()
        self._callers: set[int] = set()  # The threads that are calling a listener for a save.

    def add(self, listener: Listener) -> None:
        """Add a listener; raise ConfigError if it is not a Listener."""
        if not isinstance(listener, Listener):
            raise ConfigError(f"{listener!r:.80} is not a Listener", hint="Write listen(Listener(committed=function)).")
        self._all.append(listener)

    def committed(self, checkpoint: Checkpoint, after_s: float) -> None:
        """Report a durable commit, `after_s` seconds after training continued."""
        size_mib, waited_s = checkpoint.size_bytes / 2**20, checkpoint.cost_s
        message = "Saved step %d: %.1f MiB, training waited %.3f s, committed %.2f s later"
        _log.debug(message, checkpoint.step, size_mib, waited_s, after_s)
        self._tell("committed", checkpoint)

    def measured(self, steps: tuple[StepMetrics, ...]) -> None:
        """Report the metrics of the steps between the previous commit and this one."""
        self._tell("measured", steps)

    def failed(self, step: int, why: BaseException) -> None:
        """Report a snapshot that will not be committed."""
        self._tell("failed", step, why)

    def restored(self, report: RestoreReport) -> None:
        """Report a restore."""
        self._tell("restored", report)

    def check(self) -> None:
        """Raise StateError in a listener that a save has called: it would wait for its own save forever."""
        if threading.get_ident() in self._callers:
            raise StateError(
                "a listener is called by the save that it would wait for",
                hint="Let it return, and step, save, wait, restore or close in the training loop.",
            )

    def _tell(self, name: str, *arguments: Any) -> None:
        if name == "restored":  # After a restore no save is under way.
            self._call(name, *arguments)
            return
        self._callers.add(threading.get_ident())
        try:
            self._call(name, *arguments)
        finally:
            self._callers.discard(threading.get_ident())

    def _call(self, name: str, *arguments: Any) -> None:
        background = threading.current_thread() is not threading.main_thread()
        for listener in self._all:
            function = getattr(listener, name)
            try:
                if function is not None:
                    function(*arguments)
            except BaseException as error:  # Only log it: a listener must not stop a save.
                if not (background or isinstance(error, Exception)):
                    raise  # It is a Ctrl-C in the main thread.
                if id(listener) not in self._complained:
                    self._complained.add(id(listener))
                    _log.exception("The listener %r failed after an event %r; the run continues", function, name)
