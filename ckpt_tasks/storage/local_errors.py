"""What a local file system's errors mean: which are one object's, which the store's, and what to do about them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_tasks.errors import CkptError, ObjectExistsError, ObjectNotFoundError, StoreError

__all__ = ["DAMAGED", "HINTS", "NO_LINKS", "our_errors"]

# Errors of one object, which an older checkpoint does not share; the others are the store's.
# ext4 and xfs say EUCLEAN or EBADMSG where they find an inode damaged.
DAMAGED = (
    errno.EIO,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENXIO,
    errno.EBADMSG,
    getattr(errno, "EUCLEAN", 0),
)

# Two places cannot share a file: other file systems, ones that know no second name, too many names, another's file.
NO_LINKS = (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)

# What is there can be read, but nothing can be written.
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)

HINTS = {
    errno.ENOSPC: "The disk is full: free space, or keep fewer checkpoints (max_num_checkpoints).",
    errno.EDQUOT: "The quota is used up: free space, or keep fewer checkpoints (max_num_checkpoints).",
    errno.EACCES: "The directory is not writable for this user.",
    errno.EROFS: "The file system is mounted read-only.",
    errno.ELOOP: "A symbolic link stands where a file of the run should be; it is not followed.",
    errno.ENOTDIR: "A file stands where a directory should be.",
}


@contextmanager
def our_errors(name: str, path: Path) -> Iterator[None]:
    """Turn the system's errors into ours, so that no foreign exception crosses the port."""
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
