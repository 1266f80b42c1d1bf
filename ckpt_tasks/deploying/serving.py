"""The command `prefect`, for a server: its garbage is collected in a thread of its own.

A cursor of SQLite that is garbage is reset where it is collected, and waits there for the lock of its connection. The
connection's thread may hold that for the 60 s for which it waits for the database. Python collects wherever objects are
made: in the event loop, which would answer nobody until then, not even the request that has locked the database
[3.8.8, aiosqlite 0.22]. A thread that waits for a lock lets the loop run.
"""

from __future__ import annotations

import gc
import threading
import time
from itertools import count

__all__ = ["collect_apart"]

_COLLECT_EVERY_S = 1.0
_FULL_EVERY = 30  # of them: a full collection of a server's objects takes a tenth of a second


def collect_apart() -> None:
    """Collect garbage in a thread of its own from now on, and in no other."""
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
