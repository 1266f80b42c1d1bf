"""Prefect's log on the screen or in a pipe: a reader that closes it or stops reading must not end training."""

from __future__ import annotations

import logging

from prefect.logging.handlers import PrefectConsoleHandler

from ckpt_tasks.logs import unread


class UnreadConsole(PrefectConsoleHandler):
    """Prefect's console, which continues when its reader has closed the pipe: rich would end the process.

    The jobs of our deployments name this class in PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS, so that `prefect flow-run
    execute` outlives the worker that reads its output.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record if that is possible."""
        self.console.on_broken_pipe = lambda: None  # type: ignore[method-assign]
        with unread():
            super().emit(record)


def keep_log_readers_out() -> None:
    """Replace Prefect's consoles in this process by `UnreadConsole`, so that their reader cannot end training."""
    for log in (logging.getLogger(), *logging.Logger.manager.loggerDict.values()):
        for handler in getattr(log, "handlers", ()):
            if type(handler) is PrefectConsoleHandler:
                handler.__class__ = UnreadConsole
