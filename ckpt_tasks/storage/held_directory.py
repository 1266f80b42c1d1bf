"""A directory of this host that a user's processes share; it is emptied if no living process holds it.

Each process holds a lock on the file beside the directory. The first process empties and fills the directory, and the
others wait for it. The locks are lockf's: a forked child does not inherit them, and the kernel frees the locks of a
killed process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckpt_tasks.process import close_descriptor, open_descriptor

held_here: dict[Path, int] = {}  # The directories that this process holds, with the locks' descriptors.
os.register_at_fork(after_in_child=held_here.clear)


def hold(directory: Path, fill: Callable[[Path], None]) -> None:
    """Hold a directory until this process ends; if no other process holds it, empty it and call `fill(directory)`.

    Also removes directories beside it that no process holds. Raises OSError, and the errors of `fill`.
    """
    if directory in held_here:
        return
    parent = directory.parent
    parent.mkdir(mode=0o700, exist_ok=True)
    status = os.lstat(parent)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"{parent} is not a directory of this user's alone")
    while directory not in held_here:
        _try_to_hold(directory, fill)
    for left in parent.glob("*.lock"):
        if left.with_suffix("") not in held_here:
            with suppress(OSError):  # Another process holds it.
                _remove(left)


def _try_to_hold(directory: Path, fill: Callable[[Path], None]) -> None:
    name = directory.with_suffix(".lock")
    lock = open_descriptor(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        alone = _lock_alone(lock)
        if not alone:
            fcntl.lockf(lock, fcntl.LOCK_SH)
        if not (name.exists() and os.path.samestat(os.fstat(lock), name.stat())):
            return  # Another process has removed the directory meanwhile.
        if alone:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(mode=0o700)
            fill(directory)
            fcntl.lockf(lock, fcntl.LOCK_SH)
        held_here[directory] = lock
    finally:
        if directory not in held_here:
            close_descriptor(lock)


def _lock_alone(lock: int) -> bool:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(name: Path) -> None:
    lock = open_descriptor(name, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if _lock_alone(lock):
            shutil.rmtree(name.with_suffix(""), ignore_errors=True)
            name.unlink()
    finally:
        close_descriptor(lock)
