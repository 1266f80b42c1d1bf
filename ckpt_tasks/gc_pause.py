"""The garbage collector: pauses, collections that are known to have happened, and the thread in which it runs."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE_S, _LOOK_S = 120.0, 0.02  # How long to wait for another thread's collection, and how often to look.


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


def collect_all() -> None:
    """Collect all garbage, after another thread's collection, for which to wait at most 120 s.

    `gc.collect()` does nothing while another thread collects, and that lasts: a finalizer of a DataLoader's iterator
    waits up to 5 s for each of its workers.
    """
    began_s = time.monotonic()
    while not _collect() and time.monotonic() - began_s < _PATIENCE_S:
        time.sleep(_LOOK_S)


def _collect() -> bool:
    """Collect all garbage; return False if nothing was done."""
    _collections.full_in = None
    gc.collect()
    return _collections.full_in == threading.get_ident()


def collects_here() -> bool:
    """Return True if the garbage collector calls in this thread: a finalizer must not wait for what the thread does."""
    return _collections.now_in == threading.get_ident()


class _Collections:
    """The threads, by number, in which garbage is being collected, and in which all of it was begun last."""

    def __init__(self) -> None:
        self.now_in: int | None = None
        self.full_in: int | None = None
        gc.callbacks.append(self._note)

    def _note(self, phase: str, about: dict[str, int], thread: Callable[[], int] = threading.get_ident) -> None:
        self.now_in = thread() if phase == "start" else None
        if self.now_in is not None and about["generation"] == 2:
            self.full_in = self.now_in


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


_collections = _Collections()
_pauses = _Pauses()
os.register_at_fork(after_in_child=_pauses.forked)
