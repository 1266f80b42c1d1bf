"""What a local store needs of the operating system: system calls, the meaning of their errors, and symbolic links.

If a directory of a run is a symbolic link, we must not read, write or delete the files behind it. The check is not
atomic: an attacker who swaps directories between the check and the access wins.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ckpt_tasks.errors import CkptError, ObjectExistsError, ObjectNotFoundError, StoreError
from ckpt_tasks.system import system

_P = ParamSpec("_P")
_T = TypeVar("_T")

# The system calls that change or read the disk: the module `os`, or a replacement in tests.
Calls = Any

# These errors concern one object, so an older checkpoint may be good; all other errors concern the whole store. ext4
# and xfs return EUCLEAN or EBADMSG if a checksum shows that an inode is damaged.
DAMAGED = (
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENXIO,
    errno.EBADMSG,
    getattr(errno, "EUCLEAN", 0),
)

# A disk or a file server did not answer: this says nothing about the written bytes.
_NO_ANSWER = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
_PAUSES_S = (0.05, 0.5)
_READ_HINT = (
    "Look at the disk and try again. If it has lost this file for good, empty the file (truncate -s 0): it then counts "
    "as damaged, and the one before it is used."
)

# A hard link is impossible: two file systems, no hard links, too many links, or another user's file.
NO_LINKS = (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)

# Existing files can be read, but nothing can be written.
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)

HINTS = {
    errno.ENOSPC: "The disk is full: free space, or keep fewer checkpoints (max_num_checkpoints).",
    errno.EDQUOT: "The quota is used up: free space, or keep fewer checkpoints (max_num_checkpoints).",
    errno.EFBIG: "The file system, or a limit of this process (`ulimit -f`), allows no file so large.",
    errno.EACCES: "This user may not read or write it: be its owner, or change its owner or mode.",
    errno.EROFS: "The file system is mounted read-only.",
    errno.ELOOP: "A symbolic link stands where a file of the run should be; it is not followed.",
    errno.ENOTDIR: "A file stands where a directory should be.",
}


@contextmanager
def our_errors(name: str, path: Path) -> Iterator[None]:
    """Raise StoreError, ObjectNotFoundError, ObjectExistsError or IntegrityError in place of a system error."""
    try:
        yield
    except CkptError:
        raise
    except FileNotFoundError as error:
        raise ObjectNotFoundError("no such object", key=name) from error
    except FileExistsError as error:
        raise ObjectExistsError("the object exists already", key=name) from error
    except OSError as error:
        failure = StoreError(f"{error.strerror or error} ({path})", key=name, hint=HINTS.get(error.errno or 0))
        failure.errno = error.errno
        failure.denied = error.errno in _DENIED
        raise failure from error


def read_again(read: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a read retry twice if the disk does not answer; after that it raises a transient StoreError."""

    @wraps(read)
    def reading(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for pause_s in _PAUSES_S:
            try:
                return read(*args, **kwargs)
            except StoreError as error:
                if error.errno not in _NO_ANSWER:
                    raise
            system().sleep(pause_s)
        try:
            return read(*args, **kwargs)
        except StoreError as error:
            if error.errno in _NO_ANSWER:
                error.transient, error.hint = True, _READ_HINT
            raise

    return reading


def unlinked(root: Path, name: str, error: type[CkptError]) -> Path:
    """Return the path of an object below `root`; raise `error` if a symbolic link leads elsewhere."""
    place = os.path.dirname(name)
    link = link_above(root, place)
    if link is not None:
        hint = "A symbolic link stands where a directory of the run should be; it is not followed."
        raise error(f"{link} is a symbolic link", key=name, hint=hint)
    return root / name


def link_above(root: Path, place: str) -> str | None:
    """Return the symbolic link in place of the directory `place` below `root`, or of a directory above it, or None."""
    while place:
        path = os.path.join(root, place)
        if os.path.islink(path):
            return path
        place = os.path.dirname(place)
    return None


def fsync_directory(directory: Path, calls: Calls) -> None:
    """Make the names in a directory durable, if the file system can fsync a directory."""
    fd = calls.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        calls.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Some network file systems cannot fsync a directory.
            raise
    finally:
        calls.close(fd)


def write_at(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write a whole buffer at byte `at` of the file."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)
