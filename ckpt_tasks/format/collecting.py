"""When the garbage collector does not look."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector: it would look at 10⁵ new objects, all alive, again and again (half of the time).

    It is the process's, not the thread's: a program that turns it off while another thread has it paused finds it on
    again.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
