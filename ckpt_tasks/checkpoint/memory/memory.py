"""Memory for snapshots: private to the process, or files in a memory directory, which outlive it.

A memory directory (`/dev/shm` if it has room) holds two slots, `a` and `b`, each with the images of one snapshot and
its index, manifest and seal. Layout, below `<memory directory>/ckpt-tasks-<uid>/<run>/`::

    lock                           held by the one process that uses the slots; its text is the run directory, and at
                                   byte 4096 it has the last completed step in 8 bytes
    a/model-00000-of-00001-0.safetensors …   the images
    a/index.arrow, a/manifest.json           as on storage
    a/seal.json                    written last and removed first: a slot with a seal is complete
    b/…

Invariants

1. A slot's seal is removed before the first byte of its images changes, and written after all of them are digested.
2. Only the process that holds the lock writes, and only it reads the files of earlier processes.
3. Everything belongs to this user: a directory of another user, or a directory open to other users, is refused.
4. A forked child has no image and holds no slot: see process.py.
5. A file of a slot is written again only if an earlier process left it, and is never resized; otherwise a new file
   takes its name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from typing import Protocol

from ckpt_tasks.checkpoint.memory.pages import advise_huge, allocate_pages, has_all_pages
from ckpt_tasks.errors import ConfigError, StoreError
from ckpt_tasks.format.records import MAX_SEAL_BYTES, SEAL_NAME
from ckpt_tasks.process import close_descriptor, finalize_here, map_memory, names_in, open_descriptor
from ckpt_tasks.storage.local_fs import write_at
from ckpt_tasks.system import system

SLOTS = ("a", "b")
_DYING_S = 5.0  # A killed process of many GiB takes seconds to end.
_LOOK_AGAIN_S = 0.05
_LEFT_S = 86_400.0  # Keep the memory of a run that seems gone for this long: its disk may be mounted late.
_ABOUT_BYTES, _STEPS = 4096, Struct(">3Q")  # The parts of a lock file.
_HELD: set[Path] = set()  # The directories that this process holds: lockf does not exclude within a process.
_FILLED: set[Path] = set()  # Slots that this process has filled (or its parent, before a fork): threads may read them.


Fill = Callable[[Mapping[str, int]], bool]


class SnapshotMemory(Protocol):
    """The memory of the images of two slots."""

    url: str

    def take(self, slot: str, sizes: Mapping[str, int], fill: Fill | None = None) -> dict[str, memoryview]:
        """Return memory for the images of a slot, by name; the slot's old contents are lost.

        Raises StoreError if there is no room. If the memory consists of files, `fill` gets name → descriptor; it may
        write the files, and returns True if it did.
        """

    def sealed(self, slot: str) -> bytes | None:
        """Return a slot's seal; None if the slot is empty or its snapshot incomplete."""

    def unseal(self, slot: str) -> None:
        """Mark a slot as incomplete, because its images will change; raise StoreError if that fails."""

    def seal(self, slot: str, files: Mapping[str, bytes | memoryview], seal: bytes) -> None:
        """Mark a slot as complete: write files (index, manifest …), then the seal; raise StoreError if that fails."""

    def close(self, *, keep: bool) -> None:
        """Release the memory; `keep` sealed snapshots for the next process of this host, if the memory can."""


class PrivateMemory:
    """Anonymous memory, which ends with the process."""

    url = "memory"

    def take(self, slot: str, sizes: Mapping[str, int], fill: Fill | None = None) -> dict[str, memoryview]:
        try:
            taken = {name: map_memory(max(size_bytes, 1)) for name, size_bytes in sizes.items()}
        except OSError as error:
            raise StoreError(
                f"there is no memory for a snapshot of {sum(sizes.values())} bytes: {error.strerror}",
                hint="Two snapshots are kept beside the state: give the process (its container, `ulimit -v`) as much.",
            ) from error
        for memory in taken.values():
            advise_huge(memory)
        return taken

    def sealed(self, slot: str) -> bytes | None:
        """Return None: no other process can see private memory."""

    def unseal(self, slot: str) -> None:
        """Do nothing: no other process can see private memory."""

    def seal(self, slot: str, files: Mapping[str, bytes | memoryview], seal: bytes) -> None:
        """Do nothing: no other process can see private memory."""

    def close(self, *, keep: bool) -> None:
        """Do nothing: the memory is freed with its last user."""


class SlotFiles:
    """The slots in a directory, opened for reading, for example slots of another rank, which holds their lock."""

    _is_ours = False

    def __init__(self, path: Path):
        self.path = path
        self.url = str(path)

    @property
    def is_there(self) -> bool:
        """Whether the path still names the directory of these slots."""
        return True

    def sealed(self, slot: str) -> bytes | None:
        """Return a slot's seal; None if the slot is empty or its snapshot incomplete."""
        try:
            with _opened(self._slot(slot) / SEAL_NAME) as fd:
                return os.read(fd, MAX_SEAL_BYTES)
        except (OSError, StoreError):
            return None

    def open(self, slot: str, name: str) -> memoryview:
        """Map a file of a slot, copy-on-write; raise OSError, even for an empty file."""
        with _opened(self._slot(slot) / name) as fd:
            return map_memory(os.fstat(fd).st_size, fd, shared=False)

    def held_bytes(self) -> int:
        """Return the bytes that the slots take."""
        held_bytes = 0
        for file in self.path.rglob("*"):
            with suppress(FileNotFoundError):  # Another process may delete its file meanwhile.
                status = file.lstat()
                held_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
        return held_bytes

    def _slot(self, slot: str) -> Path:
        """Return a slot's directory, made on first use; raise StoreError if something else has its name."""
        if not self.is_there:
            raise StoreError(f"somebody has removed the memory directory {self.path}")
        directory = self.path / slot
        try:
            if self._is_ours:
                directory.mkdir(mode=0o700, exist_ok=True)
            _check_private(directory)
        except (OSError, ConfigError) as error:
            raise StoreError(f"the slot {directory} cannot be used: {error}") from error
        return directory


class MemoryDirectory(SlotFiles):
    """The slots of one run in a memory directory; raises StoreError if another process holds them.

    `about` is written into the lock file; it names the run of the slots.
    """

    _is_ours = True

    def __init__(self, root: Path, run: str, about: str = ""):
        super().__init__(root / run)
        if self.path in _HELD:
            raise StoreError(f"another Checkpointer of this process holds the memory directory {self.path}")
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            _check_private(self.path)
            lock = _open_lock(self.path / "lock")
        except OSError as error:
            raise StoreError(f"the memory directory {self.path} cannot be used: {error.strerror}") from error
        try:
            _lock(lock)
        except OSError as error:
            close_descriptor(lock)
            raise StoreError(f"another process holds the memory directory {self.path}") from error
        os.pwrite(lock, os.fsencode(about)[:_ABOUT_BYTES], 0)  # The directory's own name is only a hash.
        noted = os.pread(lock, _STEPS.size, _ABOUT_BYTES)
        self._noted: tuple[int, int, int] | None = None
        if len(noted) == _STEPS.size:
            self._noted = _STEPS.unpack(noted)
        self._again = 0, 0
        self._lock_fd = lock
        _HELD.add(self.path)
        self._lock = os.fstat(lock)
        self._unlock = finalize_here(self, _unlock, self.path, lock)

    @property
    def is_there(self) -> bool:
        # When the user logs out, logind removes all of the user's files in /dev/shm (RemoveIPC).
        try:
            return os.path.samestat(os.lstat(self.path / "lock"), self._lock)
        except OSError:
            return False

    def reached(self, begin: int) -> int | None:
        """Return the last step that earlier processes have completed after step `begin`; None if none was noted."""
        if self._noted is None:
            return None
        step, began, furthest = self._noted
        return max(step, furthest) if began == begin else step

    def note_again(self, begin: int, reached: int) -> None:
        """Note with each step that this process repeats those after `begin`, in case that it dies before a commit."""
        self._again = begin, reached

    def note_step(self, step: int) -> None:
        """Note the last completed step for the next process; do nothing if that is impossible."""
        if self.path in _HELD:  # Otherwise another file may have the descriptor's number.
            with suppress(OSError):
                os.pwrite(self._lock_fd, _STEPS.pack(step, *self._again), _ABOUT_BYTES)

    def take(self, slot: str, sizes: Mapping[str, int], fill: Fill | None = None) -> dict[str, memoryview]:
        """Unseal the slot and map its files, with all pages allocated; the old contents are lost.

        The files are new, except files of the same size that an earlier process left: their pages are allocated
        already. Raises StoreError if there is no room; the slot is empty then.
        """
        self.unseal(slot)
        directory = self._slot(slot)
        was_left = directory not in _FILLED
        _FILLED.add(directory)
        files: dict[str, int] = {}
        try:
            for name, size_bytes in sizes.items():
                left = _open_left(directory / name, size_bytes) if was_left else None
                files[name] = _open_new(directory / name) if left is None else left
            if fill is None or not fill(files):
                allocate_pages(files, sizes, lambda: True)
            taken = {name: map_memory(max(size_bytes, 1), files[name]) for name, size_bytes in sizes.items()}
        except OSError as error:
            self.clear(slot)
            raise StoreError(f"{sum(sizes.values())} bytes in {directory}: {error.strerror}") from error
        finally:
            for fd in files.values():
                close_descriptor(fd)
        return taken

    def unseal(self, slot: str) -> None:
        directory = self._slot(slot)
        try:
            (directory / SEAL_NAME).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"the seal in {directory} cannot be taken away: {error.strerror}") from error

    def seal(self, slot: str, files: Mapping[str, bytes | memoryview], seal: bytes) -> None:
        directory = self._slot(slot)
        try:
            for left in names_in(directory):
                if left.endswith(".arrow"):  # It is of the slot's previous snapshot; images are refilled.
                    (directory / left).unlink()
            for name, data in files.items():
                _write_new(directory / name, data)
            # By renaming, the seal appears whole or not at all. It needs no fsync, since it need not survive the host.
            temporary = directory / f".{SEAL_NAME}"
            _write_new(temporary, seal)
            temporary.rename(directory / SEAL_NAME)
        except OSError as error:
            raise StoreError(f"the snapshot in {directory} cannot be sealed: {error.strerror}") from error

    def clear(self, slot: str) -> None:
        """Remove all files of a slot."""
        with suppress(StoreError):  # A file or link in place of the seal is removed too; a link is not followed.
            self.unseal(slot)
        if self.is_there:
            shutil.rmtree(self.path / slot, ignore_errors=True)

    def close(self, *, keep: bool) -> None:
        if not keep and self.is_there:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()


def private_root(directory: Path) -> Path:
    """Return this user's own directory in a memory directory; raise ConfigError if other users can access it."""
    root = directory / f"ckpt-tasks-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"memory_dir {directory} cannot be used: {error.strerror}") from error
    _check_private(root)
    return root


def sweep(
    root: Path, is_gone: Callable[[str, str], bool], left_s: float = _LEFT_S, *, dry_run: bool = False
) -> list[tuple[str, int]]:
    """Remove the memory of runs that are gone; return their run directories and sizes in bytes.

    `is_gone(directory name, text of its lock)` decides. Memory that a process holds stays, and so does memory that was
    taken within the last `left_s` seconds.
    """
    swept = []

    def doomed(path: Path, lock: int) -> str | None:
        if time.time() - os.fstat(lock).st_mtime <= left_s:
            return None
        url = os.fsdecode(os.pread(lock, _ABOUT_BYTES, 0).rstrip(b"\0"))
        return url if is_gone(path.name, url) else None

    for path in set(root.iterdir()) - _HELD:  # Closing our own lock file would release the lock.
        with suppress(OSError):
            lock = _open_lock(path / "lock")
            try:
                if doomed(path, lock) is not None:  # A new directory's process may want the lock.
                    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if (url := doomed(path, lock)) is not None:
                        swept.append((url, SlotFiles(path).held_bytes()))
                        if not dry_run:
                            shutil.rmtree(path, ignore_errors=True)
            finally:
                close_descriptor(lock)
    return swept


def _lock(lock: int) -> None:
    """Take the lock; wait 5 s for another process, which must be dying since the run is ours, then raise OSError."""
    until_s = system().monotonic() + _DYING_S
    while system().monotonic() < until_s:
        with suppress(OSError):
            # Not flock: a forked DataLoader worker would still hold a flock after this process was killed.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        system().sleep(_LOOK_AGAIN_S)
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(path: Path, lock: int) -> None:
    _HELD.discard(path)
    close_descriptor(lock)


def _open_lock(path: Path) -> int:
    """Open the lock for writing; raise OSError if it is a link, or if other users can use it."""
    lock = open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not _is_ours_alone(os.fstat(lock)):
        close_descriptor(lock)
        raise OSError(errno.EINVAL, "its lock is not a file of this user's alone")
    return lock


def _open_left(path: Path, size_bytes: int) -> int | None:
    """Open a file that an earlier process left, if it has this size and all its pages; else return None."""
    with suppress(OSError):  # There is no file, or it is a link.
        fd = open_descriptor(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(fd)
        if _is_ours_alone(status) and has_all_pages(status, size_bytes):
            return fd
        close_descriptor(fd)
    return None


def _open_new(path: Path) -> int:
    """Make a new file, and unlink the old one of this name, which another process may have mapped."""
    path.unlink(missing_ok=True)
    return open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)


def _is_ours_alone(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and status.st_nlink == 1


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading; raise OSError for anything else, without waiting for a pipe."""
    fd = open_descriptor(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        yield fd
    finally:
        close_descriptor(fd)


def _write_new(path: Path, data: bytes | memoryview) -> None:
    fd = _open_new(path)
    try:
        write_at(fd, data, 0)
    finally:
        close_descriptor(fd)


def _check_private(path: Path) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{path} is not a directory of this user's alone",
            hint="Somebody else made it. Remove it, or name another memory_dir.",
        )


os.register_at_fork(after_in_child=_HELD.clear)
