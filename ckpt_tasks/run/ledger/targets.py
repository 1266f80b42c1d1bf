"""Parse DIR@STEP, the text with which a user names a checkpoint."""

from __future__ import annotations

import os

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.storage.secrets import without_secrets


def split_target(text: str) -> tuple[str, int | str | None]:
    """Split "DIR@STEP" at its last @, unless a directory has the whole text as its name.

    Returns the directory, and a step, "latest", "best", or None if there is no @. Raises ConfigError if the text after
    the @ is none of these.
    """
    directory, at, which = text.rpartition("@")
    if not at or not directory or os.path.isdir(text):
        return text, None
    if which in ("latest", "best"):
        return directory, which
    if which.isascii() and which.isdecimal() and len(which) <= 20:
        return directory, int(which)
    raise ConfigError(
        f"{without_secrets(text)!r} names neither a directory nor a checkpoint",
        hint="Write DIR@500, DIR@latest or DIR@best.",
    )
