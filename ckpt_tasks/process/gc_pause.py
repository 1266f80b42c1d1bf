"""Pause the garbage collector of the process."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector: scanning 10⁵ new live objects again and again takes half of the time.

    The pause applies to the process, not to the thread: the collector is enabled again when the last thread that paused
    it is done, even if the program has disabled it meanwhile.
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
        self._lock = threading.RLock()  # A finalizer may run while this thread holds the lock, and may pause as well.
        self._count = 0

    def begin(self) -> bool:
        """Begin a pause; return False, and do nothing, if the program itself has disabled the collector."""
        with self._lock:
            if not self._count and not gc.isenabled():
                return False
            self._count += 1
            gc.disable()
            return True

    def end(self) -> None:
        with self._lock:
            # The count is already 0 in a child that was forked during this pause.
            self._count = max(0, self._count - 1)
            if not self._count:
                gc.enable()

    def forked(self) -> None:
        """Forget all pauses in a forked child, which lacks the threads that would end them."""
        if self._count:
            gc.enable()
        self._lock, self._count = threading.RLock(), 0


_pauses = _Pauses()
os.register_at_fork(after_in_child=_pauses.forked)
