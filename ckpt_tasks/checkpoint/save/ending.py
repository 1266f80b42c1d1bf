"""The interpreter's exit: commit saves under way before Python stops the threads that write them.

Python calls atexit functions in the reverse order of their registration, while daemon threads still run. `os._exit`,
SIGKILL and a signal without a handler call no atexit function.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from datetime import datetime
from typing import Protocol

from ckpt_tasks.logs import write_line
from ckpt_tasks.system import system

_SILENT_S = 20.0
_log = logging.getLogger("ckpt_tasks")


class Ending(Protocol):
    """An object whose `end` must be called when the interpreter exits."""

    def end(self) -> None: ...


def end_with_interpreter(ending: Ending) -> None:
    """Call `ending.end()` when the interpreter exits, if it still exists then."""
    if not _endings:
        # s3fs closes its connections by weakref.finalize, which registers with atexit at its first use. Register it
        # here first, so that it runs after `_end_all`.
        weakref.finalize(Ending, int)
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    _endings.add(ending)


def say_wait(step: int, moved_s: float, timeout_s: float) -> bool:
    """If the store is silent, log the step to wait for, until when, and how to stop waiting; return True if logged."""
    silent_s = system().monotonic() - moved_s
    if silent_s < min(_SILENT_S, timeout_s / 2):
        return False
    until = datetime.fromtimestamp(system().time() + timeout_s - silent_s).astimezone()
    _log.warning(
        "Waiting until step %d is committed: the store has taken nothing for %.0f s. The wait ends at %s if it takes"
        " nothing more (flush_timeout_s); Ctrl-C, or a second one, ends it at once.",
        step,
        silent_s,
        f"{until:%H:%M:%S}",
    )
    return True


def report_lost(failure: BaseException, *, kept: bool) -> None:
    """Write to stderr which step is not committed and why; `kept`: its snapshot outlives the process."""
    step = getattr(failure, "step", None)
    then = "the next start on this host can restore it" if kept else "it is lost with this process"
    write_line(f"ckpt-tasks: step {step} is not committed, and {then}: {failure}")


def _end_all() -> None:
    for ending in [*_endings]:
        ending.end()


_endings: weakref.WeakSet[Ending] = weakref.WeakSet()
os.register_at_fork(after_in_child=_endings.clear)  # A forked child has no threads of its parent.
