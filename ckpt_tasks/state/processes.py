"""What belongs to one process: its threads, and what a forked child must not have.

`fork` copies a process with all that it maps and all that it has open, but with one thread. A child (a DataLoader's
worker, a member of a Pool) could write into images that its parent is saving, would keep memory that the parent has let
go of, and has the objects of threads that do not run there.

Invariants

1. No page of map_memory() is in a child: not to write to, not to read, and not to keep. MADV_DONTFORK says so to the
   kernel. It holds for a child that C code forks, too.
2. No descriptor of open_descriptor() or open_nameless() is open in a child that Python forks.
3. A finalizer of finalize_here() runs in the process that registered it, or never.
4. No fork comes between the making of a page or descriptor and its mark.

Threads that share work are daemon threads and not an executor's: Python shuts executors down before it waits for
threads that still train and before it calls atexit functions. From then on they refuse work, and they wait for work
that has begun, however long it takes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeVar

from ckpt_tasks.errors import ConfigError

__all__ = [
    "Process",
    "close_descriptor",
    "finalize_here",
    "in_threads",
    "lower_priority",
    "map_memory",
    "open_descriptor",
    "open_nameless",
]

_DONTFORK = 10  # MADV_DONTFORK: the mmap module of a Python that was built elsewhere may lack the name
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_forking = threading.RLock()
_descriptors: set[int] = set()


class Process:
    """The process in which an object was made."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and none that was forked from it."""
        return self.pid == os.getpid()

    def check(self) -> None:
        """Raise ConfigError in a process that was forked from the one in which the object was made."""
        if not self.is_here:
            raise ConfigError(
                f"this Checkpointer belongs to process {self.pid}, which made it; process {os.getpid()} was forked "
                "from that one and must not use it",
                hint="Save in the process that made it. To read checkpoints here, use open_run().",
            )


def map_memory(size_bytes: int, fd: int | None = None, *, shared: bool = True) -> memoryview:
    """Map zeroed memory of this process, or a file: what is written lands in the file where the mapping is `shared`.

    It is unmapped when the last view of it goes. Raises OSError if there is no memory. Not mmap.mmap: that keeps a
    descriptor of its own for each file, which children inherit, and unmaps addresses that a child may use for something
    else by then.
    """
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd is None else mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    with _forking:
        address = _mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1 if fd is None else fd, 0)
        if address == _FAILED:
            raise _os_error()
        if _madvise(address, size_bytes, _DONTFORK):
            error = _os_error()
            _munmap(address, size_bytes)
            raise error
    pages = (ctypes.c_ubyte * size_bytes).from_address(address)
    finalize_here(pages, _munmap, address, size_bytes)  # every view holds `pages`
    return memoryview(pages).cast("B")


def open_descriptor(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file as os.open() does; close it with close_descriptor()."""
    with _forking:
        fd = os.open(path, flags, mode)
        _descriptors.add(fd)
    return fd


def open_nameless() -> int:
    """Make a file in memory that has no name, and so is gone with the last process that has it open or mapped.

    Other processes of the user open it as /proc/<pid>/fd/<number>. Raises OSError, also if a system has no such
    files. Close it with close_descriptor().
    """
    with _forking:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        fd = os.memfd_create("ckpt-tasks")
        _descriptors.add(fd)
    return fd


def close_descriptor(fd: int) -> None:
    """Close what open_descriptor() or open_nameless() has opened."""
    with _forking:
        _descriptors.remove(fd)
        os.close(fd)


def finalize_here(owner: object, function: Callable[..., object], *arguments: Any) -> weakref.finalize[..., Any]:
    """Call a function when `owner` goes, in this process alone, and not at its end: the kernel takes back the rest."""
    end = weakref.finalize(owner, _in_process, os.getpid(), function, *arguments)
    end.atexit = False
    return end


def _in_process(pid: int, function: Callable[..., object], *arguments: Any) -> None:
    if os.getpid() == pid:
        function(*arguments)


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _after_in_child() -> None:
    for fd in _descriptors:
        os.close(fd)
    _descriptors.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_after_in_child)


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
