"""The directories directly below a store, for runs side by side."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.local_fs import our_errors
from ckpt_tasks.storage.port import Store, unwrapped
from ckpt_tasks.storage.retrying import RetryingStore

__all__ = ["stores_below"]

_DEADLINE_S = 10.0  # per directory; a person waits


def stores_below(store: Store) -> dict[str, Store]:
    """Return a store for each directory directly below a store, by name and in order; sends one listing.

    Raises StoreError if the store cannot be listed.
    """
    place = unwrapped(store)
    if isinstance(place, LocalStore):
        with our_errors("", place.root):
            names = (
                sorted(entry.name for entry in os.scandir(place.root) if entry.is_dir()) if place.root.is_dir() else []
            )
        return {name: LocalStore(Path(place.root, name)) for name in names if not name.startswith(".")}
    from ckpt_tasks.storage.objects import ObjectStore  # brings in fsspec

    if not isinstance(place, ObjectStore):
        return {}
    stores: dict[str, Store] = {}
    for name in place.folders():
        with suppress(ConfigError):  # not a name that a run can have
            stores[name] = RetryingStore(place.below(name), deadline_s=_DEADLINE_S)
    return stores
