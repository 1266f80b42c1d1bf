"""Publish files for other tools: write and fsync them beside the target, then rename them.

Invariants

1. A new file or directory gets its name when it is complete and fsynced. If a step before the rename fails, the name
   does not exist and no temporary file stays. (A killed process leaves a file whose name begins with .ckpt-tmp.)
2. In an existing directory the old index is removed first, and the new index is moved there last: readers do not take
   files without an index for a model. Other files stay, except old files whose names match `replaces`.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_tasks.errors import CkptError, ConfigError, StoreError
from ckpt_tasks.storage.local_fs import fsync_directory

_HINTS = {
    errno.ENOSPC: "Free space there, or choose another disk.",
    errno.EDQUOT: "Free space there, or choose another disk.",
    errno.EFBIG: "The file system, or a limit of this process, allows no file so large: write smaller ones.",
    errno.EACCES: "This user may not read or write it: be its owner, or change its owner or mode.",
    errno.EROFS: "The file system is mounted read-only.",
}


@contextmanager
def staged_file(out: Path, *, overwrite: bool) -> Iterator[int]:
    """Yield a descriptor to write to; the file gets its name when the block ends without an error.

    Raises ConfigError as `check_free` does, and StoreError if a system call fails.
    """
    temporary = out.parent / _temporary_name()
    with _errors(out):
        try:
            with new_file(temporary) as fd:
                yield fd
            check_free(out, overwrite)
            os.replace(temporary, out)
        finally:
            with suppress(OSError):  # After the rename this name is gone. Do not hide the block's error.
                os.unlink(temporary)
        fsync_directory(out.parent, os)


@contextmanager
def staged_directory(out: Path, *, overwrite: bool, replaces: re.Pattern[str], index: str) -> Iterator[Path]:
    """Yield a directory to write files into; it gets its name when the block ends without an error.

    If `out` exists and `overwrite` is True, the files move into `out`, and old files whose names match `replaces` are
    deleted. The old file `index` is removed first; the new one moves last. Raises what `staged_file` raises.
    """
    there = out.is_dir()

    def publish(staging: Path) -> None:
        if there:
            _replace_files(staging, out, replaces, index)
        else:
            os.rename(staging, out)

    with _staged(out, out if there else out.parent, publish, overwrite=overwrite) as staging:
        yield staging


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a directory to fill, which gets its name if the block succeeds; raises what `staged_file` raises."""
    with _staged(out, out.parent, lambda staging: os.rename(staging, out), overwrite=False) as staging:
        yield staging


@contextmanager
def _staged(out: Path, parent: Path, publish: Callable[[Path], None], *, overwrite: bool) -> Iterator[Path]:
    staging = parent / _temporary_name()
    with _errors(out):
        try:
            os.mkdir(staging)
            yield staging
            fsync_directory(staging, os)
            check_free(out, overwrite)
            publish(staging)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        fsync_directory(out.parent, os)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Yield the descriptor of a new file; when the block ends without an error, fsync the file."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def _temporary_name() -> str:
    return f".ckpt-tmp-{secrets.token_hex(8)}"


def check_free(out: Path, overwrite: bool) -> None:
    """Raise ConfigError if `out` exists and `overwrite` is False, or if it is a link, a pipe or a device."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise ConfigError(f"{out} exists", hint="Choose another name, or overwrite it (--overwrite, overwrite=True).")
    if not out.is_dir() and not stat.S_ISREG(out.lstat().st_mode):
        raise ConfigError(f"{out} is a link, a pipe or a device, and is not replaced", hint="Name another file.")


def _replace_files(staging: Path, out: Path, replaces: re.Pattern[str], index: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(out / index)
    fsync_directory(out, os)
    new = {name for name in os.listdir(staging) if name != index}
    for name in new:
        os.replace(staging / name, out / name)
    for name in os.listdir(out):
        if replaces.fullmatch(name) and name not in new:
            os.unlink(out / name)
    fsync_directory(out, os)
    os.replace(staging / index, out / index)
    fsync_directory(out, os)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a StoreError with a hint."""
    try:
        yield
    except CkptError:
        raise
    except OSError as error:
        hint = _HINTS.get(error.errno or 0)
        failure = StoreError(f"{error.strerror or error} ({error.filename or path})", hint=hint)
        failure.errno = error.errno
        raise failure from error
