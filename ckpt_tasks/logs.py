"""Write lines for people. A reader that has left, or a full disk, must not end training.

Any log handler may raise: logging's own if stderr is closed, a handler of the user's, and rich's, which raises
SystemExit when the reader of its output has left.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO

TOLD = "ckpt_tasks.told"  # The logger of the lines that a person sees at every start, also under `ckpt train`.


@contextmanager
def unread() -> Iterator[None]:
    """Ignore errors of a block that writes output for people."""
    with suppress(Exception):  # A handler may raise anything.
        try:
            yield
        except SystemExit as end:
            # Otherwise the SystemExit comes from a signal, which may end the process.
            if not isinstance(end.__context__, BrokenPipeError):
                raise


def guard_log() -> None:
    """Keep errors of log handlers (of our loggers and of those above them) from reaching the code that logs."""
    for name in ("ckpt_tasks", TOLD):
        log = logging.getLogger(name)
        log.handle = partial(_guarded, log.handle)  # type: ignore[method-assign]


def _guarded(handle: Callable[[logging.LogRecord], None], record: logging.LogRecord) -> None:
    with unread():
        handle(record)


def write_line(line: str) -> None:
    """Write a line to stderr; drop it if stderr is closed or full."""
    with unread():
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def tell(line: str) -> None:
    """Log a line at INFO; if the program has set no logging, write the line to stderr."""
    log = logging.getLogger("ckpt_tasks")
    if log.hasHandlers():
        logging.getLogger(TOLD).info("%s", line)
    elif max(log.level, log.manager.disable) <= logging.INFO:
        write_line(f"ckpt: {line}")


@contextmanager
def shown_meanwhile(text: str, stream: IO[str]) -> Iterator[None]:
    """Show a text while the block runs, if the stream is a terminal. Unlike rich's status, capture no output."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    with unread():
        stream.write(text)
        stream.flush()
    try:
        yield
    finally:
        with unread():
            stream.write("\r\x1b[K")
            stream.flush()
