"""Whether a write moves: stores report what they have taken, and the thread that waits for the write watches.

A limit on time alone cannot tell a slow store from one that stands still. The watch is a context variable: it follows a
call into the event loop, and a heartbeat that passes meanwhile does not count for an upload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["moved", "watching"]

_watch: ContextVar[Callable[[], None] | None] = ContextVar("ckpt_progress", default=None)


@contextmanager
def watching(on_progress: Callable[[], None]) -> Iterator[None]:
    """Call `on_progress` whenever a store has taken or given something for this thread."""
    token = _watch.set(on_progress)
    try:
        yield
    finally:
        _watch.reset(token)


def moved() -> None:
    """Report that a store has answered, or that bytes have arrived."""
    on_progress = _watch.get()
    if on_progress is not None:
        on_progress()
