"""Symbolic links in the place of a run's directories: what stands behind one is not ours to read, write or delete.

What changes while it is looked at is not found: an attacker who swaps directories at the same time wins that race.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_tasks.errors import CkptError

__all__ = ["link_above", "unlinked"]


def unlinked(root: Path, name: str, error: type[CkptError]) -> Path:
    """Return where an object lies below `root`; raise an error of this kind where a link would lead elsewhere."""
    place = os.path.dirname(name)
    link = link_above(root, place)
    if link is not None:
        hint = "A symbolic link stands where a directory of the run should be; it is not followed."
        raise error(f"{link} is a symbolic link", key=name, hint=hint)
    return root / name


def link_above(root: Path, place: str) -> str | None:
    """Return the symbolic link that stands in the place of a directory below `root`, or of one above it."""
    while place:
        path = os.path.join(root, place)
        if os.path.islink(path):
            return path
        place = os.path.dirname(place)
    return None
