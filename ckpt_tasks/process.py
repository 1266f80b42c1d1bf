"""Resources of one process: threads, and memory and descriptors that a forked child must not have.

`fork` copies a process with all its mappings and open files, but only one thread. Without this module, a child (a
DataLoader's worker, a member of a Pool) could write into images that its parent is saving, and would keep memory that
the parent has freed. A child also has thread objects without running threads.

Invariants

1. A child has no page of map_memory(): it cannot write, read or keep such a page. MADV_DONTFORK makes the kernel leave
   them out, also for a child that C code forks.
2. No descriptor of open_descriptor() or open_nameless() is open in a child that Python forks.
3. A finalizer of finalize_here() runs in the process that registered it, or never.
4. No fork happens between the creation of a page or descriptor and its mark.
5. No file of ours is descriptor 0, 1 or 2, even in a process that started without these: C code prints to them.

Threads that share work are daemon threads, not an executor's threads: Python shuts executors down before it waits for
threads that still train, and before it calls atexit functions. After that, executors refuse new work, and wait without
limit for running work.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeVar

from ckpt_tasks.errors import ConfigError, StoreError
from ckpt_tasks.system import system

_DONTFORK = 10  # This is MADV_DONTFORK; some builds of Python lack it in mmap.
_FAILED = ctypes.c_void_p(-1).value
# /proc/<pid>/fd shows this name for every file of open_nameless.
NAMELESS = "ckpt-tasks"

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
    """Remembers the process in which it was made."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True in the process that made the object; False in its forks."""
        return self.pid == os.getpid()

    def check(self) -> None:
        """Raise ConfigError in a fork of the process that made the object."""
        if not self.is_here:
            raise ConfigError(
                f"this Checkpointer belongs to process {self.pid}, which made it; process {os.getpid()} was forked "
                "from that one and must not use it",
                hint="Save in the process that made it. To read checkpoints here, use open_run().",
            )


def map_memory(size_bytes: int, fd: int | None = None, *, shared: bool = True) -> memoryview:
    """Map zeroed memory, or the file `fd`, in this process alone; writes reach the file if the mapping is `shared`.

    The mapping ends with its last view. Raises OSError if memory is short. mmap.mmap does not suffice: it keeps its own
    descriptor of each file, which children inherit, and in a child it unmaps addresses that the child may have reused.
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
    finalize_here(pages, _munmap, address, size_bytes)  # Every view keeps `pages` alive.
    return memoryview(pages).cast("B")


def fill_standard_descriptors() -> None:
    """Open /dev/null as descriptor 0, 1 and 2 if these are closed, so that no later file gets these numbers."""
    with suppress(OSError):  # /dev/null is missing, or no descriptor is free.
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(fd, True)
        os.close(fd)


def open_descriptor(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file as os.open() does, but close it in forked children. Close it with close_descriptor()."""
    with _forking:
        fd = os.open(path, flags, mode)
        _descriptors.add(fd)
    return fd


def open_nameless() -> int:
    """Make a file in memory without a name: it is freed with the last process that has it open or mapped.

    Other processes of the user can open it as /proc/<pid>/fd/<number>. Raises OSError, also if the system lacks such
    files. Close it with close_descriptor().
    """
    with _forking:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        fd = os.memfd_create(NAMELESS)
        _descriptors.add(fd)
    return fd


def names_in(directory: Path) -> list[str]:
    """List a directory while no fork can happen, so that no child inherits the descriptor that listing opens."""
    with _forking:
        return os.listdir(directory)


def close_descriptor(fd: int) -> None:
    """Close a descriptor of open_descriptor() or open_nameless()."""
    with _forking:
        _descriptors.remove(fd)
        os.close(fd)


def finalize_here(owner: object, function: Callable[..., object], *arguments: Any) -> weakref.finalize[..., Any]:
    """Call a function when `owner` is freed, only in this process, and not at its exit: the kernel then frees all."""
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


_T = TypeVar("_T")
_R = TypeVar("_R")

# A thread's stack and first objects need this much memory: without it, Python waits for ever for the thread's start.
_ROOM_BYTES = 16 << 20


def start_thread(target: Callable[..., None], *arguments: Any, name: str, daemon: bool = True) -> threading.Thread:
    """Start a thread. Raises StoreError if this process cannot start another thread."""
    try:
        mmap.mmap(-1, _ROOM_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        return system().start_thread(target, *arguments, name=name, daemon=daemon)
    except (RuntimeError, MemoryError, OSError) as error:
        failure = StoreError(
            f"this process cannot start another thread ({name}): {error}",
            hint="Raise its limits: `ulimit -u`, `ulimit -v`, or the pids and memory of its container.",
        )
        failure.transient = True
        raise failure from error


def in_threads(work: Callable[[_T], _R], items: Iterable[_T], threads: int, name: str) -> list[_R]:
    """Return `work(item)` for every item, in order; after an error, start no more items and raise that error.

    The calling thread is one of the `threads`. It does all the work if no other thread can start: if memory is short,
    or from Python 3.12 on at the exit of the interpreter.
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
    with suppress(StoreError):
        for _ in range(min(threads, len(left)) - 1):
            # Run in the caller's context, so that a store's progress counts for the caller's write.
            thread = start_thread(copy_context().run, run, name=name)
            started.append(thread)
    run()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return [result for _, result in sorted(results.items())]
