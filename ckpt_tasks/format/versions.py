"""The versions of the format; every manifest and ledger object states its own version."""

from __future__ import annotations

from typing import Any

from ckpt_tasks.errors import FormatVersionError, IntegrityError

FORMAT_VERSION = 1
# Version 2 adds manifests of many ranks and ledger objects with folded names. The KINDS of values (tree.py) and of
# groups (kinds.py) name the later versions.
RANKS_VERSION = 2
TABLES_VERSION = 4  # Version 4 adds lookup tables: a kind of group, and names of its files.


def check_version(version: Any, name: str, newest: int = FORMAT_VERSION) -> None:
    """Raise FormatVersionError if a version is above `newest`, IntegrityError if it is not a version number."""
    if type(version) is not int or version < 1:
        raise IntegrityError(f"{version!r:.40} is not a format version", key=name)
    if version > newest:
        raise FormatVersionError(
            f"format version {version!r:.40} is newer than {newest}, the newest that this code reads",
            key=name,
            hint="Upgrade ckpt-tasks.",
        )
