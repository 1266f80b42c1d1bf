"""Lines for people, which must not end training: their reader may have left, or their disk be full.

A handler may raise: logging itself if stderr is closed, a handler of the user's, and rich's, which raises SystemExit
when its reader has left.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def unread() -> Iterator[None]:
    """Go on if what the block writes for people cannot be written."""
    with suppress(Exception):  # A handler may raise anything.
        try:
            yield
        except SystemExit as end:
            # Otherwise a signal came meanwhile: it may end the process.
            if not isinstance(end.__context__, BrokenPipeError):
                raise


def guard_log() -> None:
    """Let no handler of the logger `ckpt_tasks`, or of the loggers above it, raise into the code that logs."""
    log = logging.getLogger("ckpt_tasks")
    handle: Callable[[logging.LogRecord], None] = log.handle

    def guarded(record: logging.LogRecord) -> None:
        with unread():
            handle(record)

    log.handle = guarded  # type: ignore[method-assign]


def write_line(line: str) -> None:
    """Write a line on stderr; drop it if stderr is closed or full."""
    with unread():
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
