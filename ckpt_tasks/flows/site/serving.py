"""The command `prefect` for a server, with the garbage collector in its own thread.

A thread that collects a cursor of SQLite resets it, and waits for the lock of its connection. The connection's own
thread may hold that lock for 60 s while it waits for the database. Python collects in any thread that creates objects.
If the event loop's thread collects, the server hangs, and so does the request that has locked the database (3.8.8,
aiosqlite 0.22). If a separate thread waits for the lock, the loop continues.
"""

from __future__ import annotations

import gc
import threading
import time
from itertools import count

_COLLECT_EVERY_S = 1.0
_FULL_EVERY = 30  # One of this many collections is full: with a server's objects it takes a tenth of a second.


def collect_apart() -> None:
    """Collect garbage in a separate thread from now on, and in no other."""
    gc.disable()
    threading.Thread(target=_collect, name="garbage", daemon=True).start()


def _collect() -> None:
    for turn in count():
        gc.collect(1 if turn % _FULL_EVERY else 2)
        time.sleep(_COLLECT_EVERY_S)


if __name__ == "__main__":
    collect_apart()
    from prefect.cli import app

    app()
