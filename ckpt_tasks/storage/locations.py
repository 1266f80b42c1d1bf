"""What a place's name stands for: a directory, a URL, or what another package knows under a scheme of its own.

A scheme that is not ours is looked up among the entry points of the group `ckpt_tasks.places`: their names are schemes,
and each is a function that takes what follows :// and the run's key (or None) and returns a `Place`. So Prefect's
blocks are places (block://NAME) although nothing here knows of Prefect (docs/decisions/0022).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store
from ckpt_tasks.storage.secrets import without_secrets

__all__ = ["GROUP", "Place", "find_place", "first_answer_s"]

GROUP = "ckpt_tasks.places"
# None: nothing is asked of a store when it is opened. The command line sets it for the length of one command.
first_answer_s: ContextVar[float | None] = ContextVar("first_answer_s", default=None)
_SCHEMES = frozenset({"s3", "s3a", "az", "abfs", "gs", "gcs", "memory"})  # of storage/objects.py, without its imports


@dataclass(frozen=True)
class Place:
    """A directory or an object store's URL, and how to reach it; the options may be secret, the rest is not."""

    url: str
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    single_writer: bool = False

    def open(self) -> Store:
        """Return the store. Raises ConfigError where the URL is no place.

        Nothing is asked of it yet, except on the command line: there StoreError if it does not answer in time.
        """
        scheme, separator, path = self.url.partition("://")
        if not separator or scheme == "file":
            directory = path if separator else self.url
            if os.path.exists(directory) and not os.path.isdir(directory):
                raise ConfigError(f"{directory} is a file, and no directory for checkpoints")
            return LocalStore(directory)
        from ckpt_tasks.storage.objects import ObjectStore  # brings in fsspec
        from ckpt_tasks.storage.reaching import await_first_answer
        from ckpt_tasks.storage.retrying import RetryingStore

        store = ObjectStore(self.url, self.storage_options)
        limit_s = first_answer_s.get()
        if limit_s is not None:
            await_first_answer(store, limit_s)
        return RetryingStore(store)


def find_place(
    checkpoint_dir: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, run_key: str | None = None
) -> Place:
    """Return the place that a name stands for: most stand for themselves.

    Raises ConfigError where a name that brings its own options is given others, or a scheme lacks one of its slashes,
    and what its entry point raises.
    """
    name = os.fspath(checkpoint_dir)
    _check_slashes(name)
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


def _check_slashes(name: str) -> None:
    """Raise ConfigError for "s3:/bucket/run", which would be the directory ./s3:/bucket/run."""
    scheme, colon, rest = name.partition(":")
    if not colon or rest.startswith("//"):
        return
    if scheme == "file" or scheme in _SCHEMES or entry_points(group=GROUP, name=scheme):
        name, rest = without_secrets(name), without_secrets(rest)
        do = f"Write {scheme}://{rest.lstrip('/')}, or ./{name} if it is a directory."
        if scheme == "file":
            do = f"Write {rest}, or ./{name} if it is a directory."
        raise ConfigError(f"{name!r:.200} is no place: after {scheme} come :// and a name", hint=do)
