"""When the garbage collector does not look."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused"]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector: it would look at 10⁵ new objects, all alive, again and again (half of the time).

    It is the process's, not the thread's: a program that turns it off while another thread has it paused finds it on
    again.
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
    if _paused.is_set():  # the thread that would have ended the pause is not there
        gc.enable()


os.register_at_fork(after_in_child=_after_fork)
