"""The end of the interpreter: commit saves under way before Python stops the threads that do it.

Python calls atexit functions in the reverse order of their registration, while daemon threads still run. `os._exit`,
SIGKILL and a signal without a handler call none.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from ckpt_tasks.logs import write_line

__all__ = ["end_with_interpreter", "report_lost"]


class Ending(Protocol):
    def end(self) -> None: ...


def end_with_interpreter(ending: Ending) -> None:
    """Call `ending.end()` at the interpreter's end, if it still exists then."""
    if not _endings:
        # s3fs closes its connections by weakref.finalize, which registers with atexit at first use: let it come first.
        weakref.finalize(Ending, int)
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    _endings.add(ending)


def report_lost(failure: BaseException, *, kept: bool) -> None:
    """Write on stderr which step is not committed and why; `kept`: its snapshot outlives the process."""
    step = getattr(failure, "step", None)
    then = "the next start on this host can restore it" if kept else "it is lost with this process"
    write_line(f"ckpt-tasks: step {step} is not committed, and {then}: {failure}")


def _end_all() -> None:
    for ending in [*_endings]:
        ending.end()


_endings: weakref.WeakSet[Ending] = weakref.WeakSet()
os.register_at_fork(after_in_child=_endings.clear)  # a forked child has none of the threads
