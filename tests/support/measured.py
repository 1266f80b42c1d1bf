"""Memory that a verb of `ckpt` takes, seen from within a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# What is mapped from a file can be given back at any time: only memory of the process's own is counted. Memory that
# mmap makes counts as shared.
_SCRIPT = r"""
import json, re, sys, threading
from pathlib import Path

def own():
    status = Path("/proc/self/status").read_text()
    return sum(map(int, re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))) >> 10

def watch():
    while not ended.wait(0.002):
        most[0] = max(most[0], own())

from ckpt_tasks.cli import app
def call(words):
    try:
        app(words)
    except SystemExit as end:
        assert not end.code

small, large = map(json.loads, sys.argv[1:])
call(small)
before, most, ended = own(), [0], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
call(large)
ended.set()
watcher.join()
print(*sorted({"torch", "prefect"} & {*sys.modules}), most[0] - before)
"""


def memory_of(small: Sequence[str | Path], large: Sequence[str | Path]) -> tuple[list[str], int]:
    """Call a verb with little to do, for its imports, then with much; return what else it imported, and MiB it took."""
    calls = [json.dumps([str(word) for word in words]) for words in (small, large)]
    done = subprocess.run([sys.executable, "-c", _SCRIPT, *calls], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *modules, mib = done.stdout.splitlines()[-1].split()
    return modules, int(mib)
