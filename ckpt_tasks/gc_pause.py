"""Pauses of the garbage collector, in the whole process."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector for a block: scanning 10⁵ new live objects again and again takes half of the time.

    The pause applies to the whole process. The collector is enabled again when the last such block of all threads ends,
    even if the program has disabled it meanwhile.
    """
    ours = _pauses.begin()
    try:
        yield
    finally:
        if ours:
            _pauses.end()


class _Pauses:
    """The number of pauses of the garbage collector that are under way in all threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # A finalizer in this thread may need the lock that the thread holds.
        self._count = 0

    def begin(self) -> bool:
        """Begin a pause; return False and do nothing if the program has disabled the collector."""
        with self._lock:
            if not self._count and not gc.isenabled():
                return False
            self._count += 1
            gc.disable()
            return True

    def end(self) -> None:
        with self._lock:
            # In a child that was forked during this pause, the count is already 0.
            self._count = max(0, self._count - 1)
            if not self._count:
                gc.enable()

    def forked(self) -> None:
        """Forget all pauses in a forked child, where the threads that would end them are missing."""
        if self._count:
            gc.enable()
        self._lock, self._count = threading.RLock(), 0


_pauses = _Pauses()
os.register_at_fork(after_in_child=_pauses.forked)
