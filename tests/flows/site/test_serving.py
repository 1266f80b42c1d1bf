"""A server's garbage is collected where it holds nobody up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# A thread waits for the database, and so holds the lock of its connection, of which a cursor is garbage; the main
# thread has locked the database, and makes objects until Python collects.
_LOOP = """
import sqlite3, sys, threading, time
from ckpt_tasks.flows.site.serving import collect_apart

collect_apart()
first, second = (
    sqlite3.connect(sys.argv[1], timeout=20, isolation_level=None, check_same_thread=False) for _ in range(2)
)
first.execute("pragma journal_mode=wal").fetchall()
first.execute("create table t (x)")

class Cycle: ...

def leave():
    cycle = Cycle()
    cycle.itself, cycle.cursor = cycle, second.execute("pragma busy_timeout")

leave()
first.execute("begin immediate")
waits = threading.Thread(target=lambda: print(second.execute("insert into t values (1)").rowcount))
waits.start()
time.sleep(0.5)
objects = [[] for _ in range(100_000)]
first.execute("commit")
waits.join()
"""


def test_a_cursor_that_is_garbage_does_not_stop_the_loop(tmp_path: Path) -> None:
    """The loop comes to its commit, so the thread that waits for the database writes, before its timeout."""
    done = subprocess.run(
        [sys.executable, "-c", _LOOP, str(tmp_path / "a.db")], capture_output=True, text=True, check=False
    )
    assert done.stdout == "1\n", done.stderr
