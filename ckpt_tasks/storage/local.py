"""A local directory as a store, durable through power loss.

Invariants

1. `put` returns after fsync of the file and of every directory whose entry is new (without the directory's fsync a
   power loss can remove the name: seen on ext4, xfs and btrfs).
2. `put_if_absent` writes a temporary name in the same directory, fsyncs it, and then `link(2)`s it: a reader sees no
   object or a whole one, and only one of several writers wins (a check before the write let several win in 88 of 200
   rounds).
3. A failed fsync is final: the store gives the file up without another fsync (the kernel has dropped the pages).
4. A read that fails with an I/O error is retried, and then raises StoreError. An I/O error never counts as damage: a
   reader must not use an older ledger entry or checkpoint because a disk did not answer.

The store writes large bodies with O_DIRECT from aligned buffers, and their tails through the page cache: the speed
stays steady, and training keeps the page cache. If a file system refuses O_DIRECT, all writes use the page cache.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from operator import itemgetter
from pathlib import Path

from ckpt_tasks.errors import CkptError, CommitUncertainError, ConfigError, IntegrityError, StoreError
from ckpt_tasks.format.keys import is_object_name
from ckpt_tasks.storage.local_fs import (
    DAMAGED,
    HINTS,
    NO_LINKS,
    Calls,
    fsync_directory,
    link_above,
    our_errors,
    read_again,
    unlinked,
)
from ckpt_tasks.storage.port import OneByOne, Store, base_of, check_name, moved
from ckpt_tasks.storage.reserve import Reserve

_PIECE_BYTES = 16 << 20
_SYNCED_BYTES = 256 << 20  # Fsync after at most this many bytes in the page cache.
_DIRECT_BYTES = 1 << 20  # Below this size, alignment costs more than it saves.
_ALIGNMENT = 4096
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}", re.ASCII)
_OLD_S = 3600.0
_NAMES_TRIED = 3
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


class LocalStore(OneByOne):
    """Keeps objects as files below a directory.

    The first write creates `root`. Directories get mode 0700 and files 0600, or 0770 and 0660 with `group_access`.
    `calls`: the module whose system calls the store uses.
    """

    near = True
    gap_bytes = 0
    endpoint: str | None = None

    def __init__(self, root: str | os.PathLike[str], *, group_access: bool = False, calls: Calls = os):
        text = os.fspath(root)
        if "://" in text or "\0" in text or not text:
            raise ConfigError(f"{text!r} is not a local directory")
        try:
            self.root = Path(text).expanduser().absolute()
        except (RuntimeError, FileNotFoundError) as error:
            raise ConfigError(
                f"{text!r} has no absolute path: there is no such home, or the working directory has been removed",
                hint="Give a path that begins with /.",
            ) from error
        self.url = str(self.root)
        self._calls = calls
        self._group_access = group_access
        self._file_mode = 0o660 if group_access else 0o600
        self._directory_mode = 0o770 if group_access else 0o700
        self._durable: set[Path] = set()
        self._making = threading.Lock()  # Several threads may write the first objects of a directory at once.
        self._reserve = Reserve(self.root, self._write_new, self._unlink)

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def put(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        path = self._path(name)
        with our_errors(name, path):
            self._directory(path.parent)
            self._write(path, [memoryview(piece).cast("B") for piece in body])
            fsync_directory(path.parent, self._calls)

    def put_if_absent(self, name: str, body: bytes) -> None:
        path = self._path(name)
        with our_errors(name, path):
            self._reserve.spend(name, lambda: self._publish(path, name, body))

    def replace(self, name: str, body: bytes) -> None:
        path = self._path(name)
        with our_errors(name, path):
            temporary = self._write_temporary(path, body)
            try:
                self._calls.replace(temporary, path)
            except BaseException:
                self._unlink_quietly(temporary)
                raise

    def adopt(self, source: Store, name: str, size_bytes: int) -> bool:
        if not isinstance(source, LocalStore):
            return False
        path, theirs = self._path(name), source._path(name, IntegrityError)
        if source.size(name) != size_bytes:
            raise IntegrityError(f"the object has {source.size(name)} bytes of {size_bytes}", key=name)
        with our_errors(name, path):
            self._directory(path.parent)
            try:
                self._calls.link(theirs, path)
            except OSError as error:
                # An earlier try may have made the link although its answer was lost.
                if not (path.exists() and os.path.samefile(theirs, path)):
                    if error.errno in NO_LINKS or isinstance(error, FileExistsError):
                        return False
                    raise
            fsync_directory(path.parent, self._calls)
        return True

    @read_again
    def get(self, name: str, max_bytes: int) -> bytes:
        with self._opened(name) as (fd, size_bytes):
            if size_bytes > max_bytes:
                raise IntegrityError(f"the object has {size_bytes} bytes, more than {max_bytes}", key=name)
            buffer = bytearray(size_bytes)
            self._fill(fd, 0, memoryview(buffer), name)
            return bytes(buffer)

    @read_again
    def read(self, name: str, begin: int, into: memoryview) -> None:
        with self._opened(name) as (fd, _):
            self._fill(fd, begin, into, name)

    @read_again
    def size(self, name: str) -> int:
        with self._opened(name) as (_, size_bytes):
            return size_bytes

    @read_again
    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        base = base_of(prefix)
        if link_above(self.root, base) is not None:
            return []  # Files behind a symbolic link do not belong to this run.
        with our_errors(prefix, self.root):
            return list(islice(self._walk(self.root / base if base else self.root, base), limit))

    def delete(self, name: str) -> None:
        path = self._path(name)
        with our_errors(name, path):
            with suppress(FileNotFoundError):
                self._calls.unlink(path)
            self._remove_empty(path.parent)

    def drop_unfinished(self, dead: Callable[[str], bool]) -> None:
        """Do nothing: an unfinished file has its attempt's name, and is deleted with the attempt."""

    def assume_single_writer(self) -> None:
        """Do nothing: every local file system has `link`, which never replaces."""

    def keep_room(self) -> None:
        """Reserve disk space that only ledger entries use."""
        self._reserve.fill()

    # ── paths ────────────────────────────────────────────────────────────────────────────────────────────────

    def _path(self, name: str, error: type[CkptError] = StoreError) -> Path:
        check_name(name)
        return unlinked(self.root, name, error)

    def _walk(self, directory: Path, prefix: str) -> Iterator[str]:
        """Yield the names below a directory in order, lazily: the first names alone cost one listing."""
        try:
            entries = [
                (f"{e.name}/" if e.is_dir(follow_symlinks=False) else e.name, e) for e in self._calls.scandir(directory)
            ]
        except (FileNotFoundError, NotADirectoryError):
            return
        for part, entry in sorted(entries, key=itemgetter(0)):
            name = f"{prefix}/{entry.name}" if prefix else entry.name
            if not is_object_name(name):
                continue  # Skip temporary names, .nfs*, .DS_Store and other foreign files.
            if part.endswith("/") and "." not in entry.name:
                yield from self._walk(Path(entry.path), name)
            elif entry.is_file(follow_symlinks=False) or "." in entry.name:
                yield name  # Yield the name of a link, a pipe or a directory, too: reading it will raise.

    def _directory(self, directory: Path) -> None:
        """Create a directory if missing, and always fsync its name: its creator may have died before the fsync."""
        with self._making:
            self._make_directory(directory)

    def _make_directory(self, directory: Path) -> None:
        if directory in self._durable and directory.exists():
            return
        if self.root in directory.parents or not directory.parent.exists():
            self._make_directory(directory.parent)
        existed = directory.exists()
        if existed:
            self._sweep(directory)
        else:
            with suppress(FileExistsError):
                self._mkdir(directory)
        try:
            fsync_directory(directory.parent, self._calls)
        except PermissionError:
            if directory != self.root or not existed:
                raise  # Only if the run directory exists, a directory above it may be unreadable.
        self._durable.add(directory)

    def _mkdir(self, directory: Path) -> None:
        try:
            self._calls.mkdir(directory, self._directory_mode)
        except (FileNotFoundError, PermissionError) as error:  # For example, /proc allows no new directory.
            if self.root.exists():
                raise
            hint = "Choose another directory, or change who may write there."
            raise ConfigError(f"{directory} cannot be made: {error.strerror}", hint=hint) from error
        self._share(directory, self._directory_mode)

    def _sweep(self, directory: Path) -> None:
        """Delete temporary files of killed processes; skip recent ones, which a living process may be writing."""
        for path in Path(directory).glob(".tmp-*"):
            with suppress(OSError):  # Another process may sweep as well.
                if _TEMPORARY.fullmatch(path.name) and time.time() - path.lstat().st_mtime > _OLD_S:
                    self._calls.unlink(path)

    def _remove_empty(self, directory: Path) -> None:
        while directory != self.root and self.root in directory.parents:
            try:
                os.rmdir(directory)
            except OSError:
                return  # The directory is not empty, or another process has removed it.
            self._durable.discard(directory)
            directory = directory.parent

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def _publish(self, path: Path, name: str, body: bytes) -> None:
        temporary = self._write_temporary(path, body)
        try:
            self._link(temporary, path)
            self._confirm(path, name)
        finally:
            self._unlink_quietly(temporary)

    def _write_temporary(self, path: Path, body: bytes) -> Path:
        """Write a file beside `path`, and return where it is."""
        for _ in range(_NAMES_TRIED):
            temporary = path.parent / f".tmp-{secrets.token_hex(8)}"
            # Over NFS a file can be made, the answer lost, and the repeated request refused: `path` does not exist.
            with suppress(FileExistsError):
                self._write_new(temporary, body)
                return temporary
        raise OSError(errno.EIO, "each new file is said to exist already")

    def _write_new(self, path: Path, body: bytes) -> None:
        self._directory(path.parent)
        self._write(path, [memoryview(body)])

    def _write(self, path: Path, pieces: Sequence[memoryview]) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | _O_NOFOLLOW
        fd = self._calls.open(path, flags, self._file_mode)
        try:
            try:
                self._share(path, self._file_mode)
                at = 0
                for piece in pieces:
                    done = self._write_direct(path, piece, at)
                    self._write_all(fd, piece[done:], at + done)
                    at += piece.nbytes
                self._calls.fsync(fd)
            finally:
                self._calls.close(fd)
        except BaseException:
            self._unlink_quietly(path)
            raise

    def _write_direct(self, path: Path, piece: memoryview, at: int) -> int:
        """Write the aligned part of a large buffer without the page cache; return how many bytes are written."""
        aligned_bytes = piece.nbytes - piece.nbytes % _ALIGNMENT
        if not _O_DIRECT or aligned_bytes < _DIRECT_BYTES or at % _ALIGNMENT or _address(piece) % _ALIGNMENT:
            return 0
        try:
            fd = self._calls.open(path, os.O_WRONLY | _O_DIRECT | _O_NOFOLLOW)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return 0  # tmpfs and some overlays refuse O_DIRECT at open.
            raise
        try:
            done = 0
            while done < aligned_bytes:
                try:
                    count = self._calls.pwrite(fd, piece[done : min(aligned_bytes, done + _PIECE_BYTES)], at + done)
                except OSError as error:
                    if error.errno == errno.EINVAL:
                        return done  # Other file systems refuse O_DIRECT at the first write.
                    raise
                done += count
                moved()
                if count % _ALIGNMENT:
                    break  # After a short write the rest is unaligned: `_write_all` writes it.
            return done
        finally:
            self._calls.close(fd)

    def _write_all(self, fd: int, piece: memoryview, at: int) -> None:
        done = 0
        while done < piece.nbytes:
            before = done
            done += self._calls.pwrite(fd, piece[done : done + _PIECE_BYTES], at + done)
            if done // _SYNCED_BYTES > before // _SYNCED_BYTES:
                self._calls.fsync(fd)  # One fsync at the end of a large file would take long and show no progress.
            moved()

    def _link(self, temporary: Path, path: Path) -> None:
        try:
            self._calls.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:
            # Over NFS the answer to a link can be lost: a link count of two shows that the link was made.
            if os.stat(temporary).st_nlink != 2:
                raise

    def _share(self, path: Path, mode: int) -> None:
        if self._group_access:
            os.chmod(path, mode)  # Undo the umask for the group; the file is new and ours.

    def _confirm(self, path: Path, name: str) -> None:
        """Make a new link durable; if that fails, raise CommitUncertainError: the name exists, but may not survive."""
        try:
            fsync_directory(path.parent, self._calls)
        except OSError as error:
            raise CommitUncertainError(
                f"the name was written and the disk did not confirm it ({error.strerror or error})",
                key=name,
                hint="Look at the disk; then start again, and the run resumes from what the ledger says.",
            ) from error

    def _unlink(self, path: Path) -> None:
        self._calls.unlink(path)

    def _unlink_quietly(self, path: Path) -> None:
        # The caller raises the earlier error; every listing ignores a leftover temporary name.
        with suppress(OSError):
            self._calls.unlink(path)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        path = self._path(name, IntegrityError)
        with our_errors(name, path):
            try:
                # O_NONBLOCK: opening a FIFO must not block the reader.
                fd = self._calls.open(path, os.O_RDONLY | _O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    status = os.fstat(fd)
                    if not stat.S_ISREG(status.st_mode):
                        raise IntegrityError("not a regular file", key=name)
                    yield fd, status.st_size
                finally:
                    self._calls.close(fd)
            except OSError as error:
                if error.errno in DAMAGED:
                    raise IntegrityError(
                        f"{error.strerror} ({path})", key=name, hint=HINTS.get(error.errno or 0)
                    ) from error
                raise

    def _fill(self, fd: int, begin: int, into: memoryview, name: str) -> None:
        done = 0
        while done < into.nbytes:
            count = self._calls.preadv(fd, [into[done : done + _PIECE_BYTES]], begin + done)
            if count == 0:
                why = f"the object ends at byte {begin + done}, {into.nbytes - done} too early"
                raise IntegrityError(why, key=name)
            done += count


def _address(piece: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])
