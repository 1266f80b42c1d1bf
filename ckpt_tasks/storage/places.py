"""What a place's name stands for: a directory, a URL, or what another package knows under a scheme of its own.

A scheme that is not ours is looked up among the entry points of the group `ckpt_tasks.places`: their names are schemes,
and each is a function that takes what follows :// and the run's key (or None) and returns a `Place`. So Prefect's
blocks are places (block://NAME) although nothing here knows of Prefect (docs/decisions/0022).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store

__all__ = ["GROUP", "Place", "find_place"]

GROUP = "ckpt_tasks.places"
_SCHEMES = frozenset({"s3", "s3a", "az", "abfs", "gs", "gcs", "memory"})  # of storage/objects.py, without its imports


@dataclass(frozen=True)
class Place:
    """A directory or an object store's URL, and how to reach it; the options may be secret, the rest is not."""

    url: str
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    single_writer: bool = False

    def open(self) -> Store:
        """Return the store; nothing is asked of it yet. Raises ConfigError where the URL is no place."""
        scheme, separator, path = self.url.partition("://")
        if not separator or scheme == "file":
            directory = path if separator else self.url
            if os.path.exists(directory) and not os.path.isdir(directory):
                raise ConfigError(f"{directory} is a file, and no directory for checkpoints")
            return LocalStore(directory)
        from ckpt_tasks.storage.objects import ObjectStore  # brings in fsspec
        from ckpt_tasks.storage.retrying import RetryingStore

        return RetryingStore(ObjectStore(self.url, self.storage_options))


def find_place(
    checkpoint_dir: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, run_key: str | None = None
) -> Place:
    """Return the place that a name stands for: most stand for themselves.

    Raises ConfigError where a name that brings its own options is given others, and what its entry point raises.
    """
    name = os.fspath(checkpoint_dir)
    scheme, separator, rest = name.partition("://")
    if not separator or scheme == "file" or scheme in _SCHEMES:
        return Place(name, storage_options)
    for known in entry_points(group=GROUP, name=scheme):
        if storage_options:
            raise ConfigError(
                f"{scheme}://… brings its own storage_options", hint="Leave storage_options out, or name the URL."
            )
        place: Place = known.load()(rest, run_key)
        return place
    return Place(name, storage_options)  # opening it says what is wrong with the scheme
