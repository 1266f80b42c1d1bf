"""Share work among daemon threads.

Not an executor's: Python shuts executors down before it waits for threads that train on and before it calls atexit
functions, refuses them work from then on, and waits for what they have begun, however long that takes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

__all__ = ["in_threads", "lower_priority"]

_NICER = 10  # with 19 or 0 a copy cost training no less, and 19 may wait long for a core that others use as well

_T = TypeVar("_T")
_R = TypeVar("_R")


def in_threads(work: Callable[[_T], _R], items: Iterable[_T], threads: int, name: str) -> list[_R]:
    """Return `work(item)` for every item, in their order; raise the first error, and begin no further item after it.

    The calling thread is one of the `threads`. It does all the work where the process may start none: at the
    interpreter's end from Python 3.12 on.
    """
    left, results, errors = deque(enumerate(items)), dict[int, _R](), list[BaseException]()

    def run() -> None:
        while not errors:
            try:
                place, item = left.popleft()
            except IndexError:
                return
            try:
                results[place] = work(item)
            except BaseException as error:  # noqa: BLE001 (raised by the thread that waits)
                errors.append(error)

    started: list[threading.Thread] = []
    for _ in range(min(threads, len(left)) - 1):
        # With the context of the caller, so that what a store has taken counts as progress of the caller's write.
        thread = threading.Thread(target=copy_context().run, args=(run,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            break
        started.append(thread)
    run()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return [result for _, result in sorted(results.items())]


def lower_priority() -> None:
    """Let the calling thread run when the process does not want the core: nicer than that by 10, up to 19."""
    if sys.platform == "linux":  # elsewhere niceness is the process', not the thread's
        with suppress(OSError):
            niceness = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICER, 19)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
