"""Processes of this host, found by a variable in their environment or by the directory that they work in."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path


def with_variable(variable: str) -> dict[int, str]:
    """Return the commands of the processes with `NAME=text` in their environment; a zombie has none."""
    return _found(lambda process: variable.encode() in (process / "environ").read_bytes().split(b"\0"))


def in_directory(*places: str) -> dict[int, str]:
    """Return the commands of the processes whose working directory begins with one of these."""
    return _found(lambda process: os.readlink(process / "cwd").startswith(places))


def kill(pids: Collection[int]) -> None:
    """Kill processes, the last of them first; those that are gone by then are no error."""
    for pid in sorted(pids, reverse=True):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _found(is_one: Callable[[Path], bool]) -> dict[int, str]:
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It has ended, or is another user's.
            if is_one(process):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(process.name)] = command.decode(errors="replace")
    return dict(sorted(found.items()))
