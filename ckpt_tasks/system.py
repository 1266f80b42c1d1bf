"""The only source of clocks, threads and random numbers for the protocol.

The protocol's decisions (which process is fenced, which checkpoint is pruned, which rank waits) depend only on this
source and on the store. A simulation of many processes passes its own `System` to `use`: then each seed gives one
repeatable schedule.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

# Measured: niceness 19 slows training as much as 0 does, and may delay a copy for long on a busy machine.
_NICER = 10
_dice = random.SystemRandom()  # Python's own generator belongs to training and is saved with it.
_of_libraries = random.Random()  # This object has the functions of the module `random`, and a stream of its own.


class System:
    """The clocks, threads, locks and random numbers of this process on this machine."""

    def time(self) -> float:
        """Return the seconds since 1970, by a clock that may be set."""
        return time.time()

    def monotonic(self) -> float:
        """Return the seconds of a clock that never jumps."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for this many seconds."""
        time.sleep(seconds)

    def start_thread(
        self, target: Callable[..., None], *arguments: Any, name: str, daemon: bool = True
    ) -> threading.Thread:
        """Start a thread. Raises RuntimeError if the process cannot have another thread."""
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=daemon)
        thread.start()
        return thread

    def age_s(self) -> float:
        """Return how long this process has run, in seconds; 0 if this is unknown."""
        start = process_start(os.getpid())
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(start) / os.sysconf("SC_CLK_TCK") if start else 0.0

    def lower_priority(self) -> None:
        """Lower the calling thread's priority: add 10 to the process's niceness, up to 19."""
        if sys.platform == "linux":  # Elsewhere niceness belongs to the whole process, not to the thread.
            with suppress(OSError):
                niceness = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICER, 19)
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)

    def lock(self) -> threading.Lock:
        """Return a new lock."""
        return threading.Lock()

    def event(self) -> threading.Event:
        """Return a new event."""
        return threading.Event()

    def condition(self) -> threading.Condition:
        """Return a new condition."""
        return threading.Condition()

    def local(self) -> threading.local:
        """Return an object with separate attributes for each thread."""
        return threading.local()

    def queue(self) -> SimpleQueue[Any]:
        """Return a new queue."""
        return SimpleQueue()

    def token_hex(self, size_bytes: int) -> str:
        """Return random bytes as hex; no two calls, in any processes, return the same."""
        return secrets.token_hex(size_bytes)

    def uniform(self, low: float, high: float) -> float:
        """Return a random number between two numbers."""
        return _dice.uniform(low, high)

    def host(self) -> str:
        """Return this machine's name."""
        return socket.gethostname()


_system = System()


def system() -> System:
    """Return the System that this process uses."""
    return _system


def use(other: System) -> System:
    """Use another System from now on; return the previous one."""
    global _system
    before, _system = _system, other
    return before


def keep_out_of_streams(*libraries: str) -> None:
    """Give the loaded modules of `libraries` that use Python's `random` a generator of their own.

    The stream of the process is part of training's state, and libraries draw from it in threads of their own: waits
    before a retry (gcsfs 2026.8), pings (websockets 16.1), orders (aiohttp 3.14).
    """
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in libraries and vars(module).get("random") is random:
            module.random = _of_libraries  # type: ignore[attr-defined]


def now_iso() -> str:
    """Return the current time as text, for people; no decision depends on it."""
    return datetime.fromtimestamp(_system.time(), UTC).isoformat(timespec="milliseconds")


def boot_id() -> str:
    """Return the kernel's id of this boot of the machine; "" if it has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def gang_rank() -> str | None:
    """Return a text that names this process's rank, if a launcher has started several ranks; else None."""
    size = os.environ.get("WORLD_SIZE", "")
    several = size.isdecimal() and int(size) > 1 and "RANK" in os.environ
    return f"this is rank {os.environ['RANK']} of {size}" if several else None


def host_name() -> str:
    """Name this kernel, process namespace and user: ranks with equal names can open each other's files.

    Returns "" if no file of another process can be opened.
    """
    try:
        boot = boot_id()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}" if boot else ""
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Return a process's start in clock ticks since boot; "" if it is a zombie, None if it is hidden."""
    fields: list[str] = []
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def has_ended(pid: int, start: str) -> bool:
    """Return True if a process of this system has certainly ended; /proc may hide other users' processes."""
    # os.kill raises PermissionError for another user's process, and OverflowError for a number that is too large.
    with suppress(PermissionError, OverflowError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
    now = process_start(pid)
    return now is not None and now != start
