"""How much is free where a store writes."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store, unwrapped

__all__ = ["free_bytes"]


def free_bytes(store: Store) -> int | None:
    """Return the bytes free for this user on a local store's disk, also before its directory is made.

    None for a server, which has no limit that it tells, and where the system does not say. Quotas are not seen.
    """
    place = unwrapped(store)
    if not isinstance(place, LocalStore):
        return None
    directory = next(path for path in (place.root, *place.root.parents) if path.exists() or path == Path("/"))
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
