"""Disk space that a run directory reserves for its ledger, so that a run on a full disk can still be pruned.

A take-over, a prune, a release and a lease each write a ledger entry. If the disk is full, or a quota used up, even a
ledger entry does not fit. So the owner of a run keeps 16 files in the directory `.ckpt-reserve`. If an entry does not
fit, the store deletes one file and writes the entry again (docs/internals/decisions/0030).

Invariants

1. Only the ledger uses the reserve. Data would use it up at once and leave nothing for the prune.
2. A process creates or deletes a file of the reserve, and never cuts or overwrites it. So two processes that need room
   at the same time delete two files, each deletion also frees an inode, and a file with a second name keeps its bytes.
3. A run goes on if its reserve cannot be made.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckpt_tasks.errors import StoreError
from ckpt_tasks.format.keys import is_live_list, parse_ledger_name
from ckpt_tasks.storage.local_fs import unlinked

_NAMES = tuple(f".ckpt-reserve/{n:02d}" for n in range(16))
_FILE_BYTES = 64 << 10
_FULL = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger("ckpt_tasks")


class Reserve:
    """The reserve of one run directory.

    `write`: creates a file and its directory; `unlink`: deletes a file.
    """

    def __init__(self, root: Path, write: Callable[[Path, bytes], None], unlink: Callable[[Path], None]):
        self._root = root
        self._write = write
        self._unlink = unlink
        self._warned = False

    def fill(self) -> None:
        """Make the missing files of the reserve; log one warning if that fails."""
        try:
            for name in _NAMES:
                self._make(unlinked(self._root, name, StoreError))
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "%s: no room could be reserved (%s). On a full disk this run may not be pruned or taken over.",
                    self._root,
                    error.strerror or error,
                )

    def spend(self, name: str, write: Callable[[], None]) -> None:
        """Write an object; if it is a ledger entry and the disk is full, delete files of the reserve until it fits."""
        of_ledger = parse_ledger_name(name) is not None or is_live_list(name)
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in _FULL or not of_ledger or not self._delete_one():
                    raise

    def _make(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            if os.lstat(path).st_size == _FILE_BYTES:
                return
            self._unlink(path)  # Its writer was killed.
        with suppress(FileExistsError):  # Another process has made the file meanwhile.
            # Write random bytes: a file system that compresses or shares equal blocks would reserve no room for zeros.
            self._write(path, os.urandom(_FILE_BYTES))

    def _delete_one(self) -> bool:
        with suppress(OSError):  # The caller raises the error of the entry.
            for name in _NAMES:
                with suppress(FileNotFoundError):
                    self._unlink(unlinked(self._root, name, StoreError))
                    return True
        return False
