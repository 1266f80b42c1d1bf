"""Pauses of the garbage collector."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused"]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector: it would scan 10⁵ new live objects again and again (half of the time).

    It belongs to the process, not to the thread: if a program disables it while another thread has paused it, the end
    of the pause enables it again.
    """
    if not gc.isenabled():
        yield
        return
    _paused.set()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        _paused.clear()


_paused = threading.Event()


def _after_fork() -> None:
    if _paused.is_set():  # the thread that would end the pause was not forked
        gc.enable()


os.register_at_fork(after_in_child=_after_fork)
