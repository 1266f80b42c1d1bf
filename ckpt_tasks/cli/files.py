"""Files that a verb writes for people: whole or not at all, and only in the place of a regular file."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckpt_tasks.errors import ConfigError

__all__ = ["write_file"]

_HEAD_BYTES = 4096


def write_file(place: Path, text: str, *, what: str, option: str, is_ours: Callable[[bytes], bool]) -> None:
    """Write a file beside its place and rename it; what lies there is replaced only if `is_ours` says so of its head.

    Raises ConfigError for a link, a directory, a pipe or a device in its place, for another file, and where the system
    refuses; `what` and `option` say in the error what was to be written, and which option names another place.
    """
    hint = f"Name another file with {option}."
    temporary = place.with_name(f".{place.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        head = _head(place)
        if head is None or not is_ours(head):
            raise ConfigError(f"{place} is no {what} and is not replaced", hint=hint)
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(place)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
    except OSError as error:
        raise ConfigError(f"the {what} cannot be written: {error}", hint=hint) from error


def _head(place: Path) -> bytes | None:
    """Return the first bytes of a regular file, nothing where there is none; None for what is no regular file."""
    try:
        status = place.lstat()
    except FileNotFoundError:
        return b""
    if not stat.S_ISREG(status.st_mode):
        return None
    with open(place, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        return file.read(_HEAD_BYTES)
