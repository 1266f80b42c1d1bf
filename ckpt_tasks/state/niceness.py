"""How the threads that save give way to the one that trains."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

__all__ = ["be_nice"]

_NICER = 10  # with 19 or 0 a copy cost training no less, and 19 may wait long for a core that others use as well


def be_nice() -> None:
    """Let the calling thread run when the process does not want the core: nicer than that by 10, up to 19."""
    if sys.platform == "linux":  # elsewhere niceness is the process', not the thread's
        with suppress(OSError):
            niceness = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICER, 19)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
