"""The location of a run: a directory, a URL, or a name that another package resolves.

Unknown schemes are looked up in the entry points of the group `ckpt_tasks.places`. An entry point has the name of its
scheme, and loads a function that takes the text after :// and the run's key (or None), and returns a `Location`. So a
location can name a Prefect block (block://NAME), although this package does not import Prefect (decision 0022).

A run waits for minutes until an outage ends. At the command line, and at a host's first start of a run, a misspelled
name or missing credentials are more likely than an outage, so the wait is short; some clients (Google's) search for
credentials for minutes.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

from ckpt_tasks.errors import CkptError, ConfigError, StoreError
from ckpt_tasks.format.keys import FORMAT_NAME
from ckpt_tasks.process import start_thread
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.local_fs import our_errors
from ckpt_tasks.storage.port import SCHEMES, Store, inner_store
from ckpt_tasks.storage.secrets import without_secrets

_log = logging.getLogger("ckpt_tasks")
GROUP = "ckpt_tasks.places"
# The limit in seconds for a first answer; None: opening a store sends no request. The command line sets it per command.
first_answer_s: ContextVar[float | None] = ContextVar("first_answer_s", default=None)
_BELOW_S = 10.0  # The limit for requests about directories below a store; it is short, because a person waits.
_MODELS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


@dataclass(frozen=True)
class Location:
    """A run's directory or object store URL, and how to reach it.

    `storage_options` go to the store's file system (s3fs, adlfs, gcsfs); they may hold secrets, so a repr omits them.
    Without them the client takes credentials from a profile, the environment or an instance role. `single_writer`
    avoids conditional writes: you must ensure that only one process at a time writes. Raises ConfigError for a
    URL or options of another type.
    """

    # Prefect validates a flow's parameter with pydantic, which reads this setting: pydantic then refuses unknown
    # options.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    url: str
    _: KW_ONLY
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    single_writer: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url or "\0" in self.url:
            raise ConfigError(f"a location is a directory or a URL, a str, not {self.url!r:.200}")
        options = self.storage_options  # Never show the values: they may be secret.
        if options is not None and not (isinstance(options, Mapping) and all(isinstance(key, str) for key in options)):
            raise ConfigError("storage_options must be a dict of the file system's options")
        if type(self.single_writer) is not bool:
            raise ConfigError(f"single_writer must be True or False, not {self.single_writer!r}")

    def resolve(self, run_key: str | None = None) -> Location:
        """Return the location that a name such as `block://NAME` stands for; a directory or URL returns itself.

        `run_key`: some names need the run's key. Raises ConfigError if this location has options and the name brings
        its own, or if a scheme lacks a slash; also raises the errors of the name's entry point.
        """
        _check_slashes(self.url)
        scheme, separator, rest = self.url.partition("://")
        if not separator or scheme == "file" or scheme in SCHEMES:
            return self
        for known in entry_points(group=GROUP, name=scheme):
            if self.storage_options:
                raise ConfigError(
                    f"{scheme}://… brings its own storage_options", hint="Leave storage_options out, or name the URL."
                )
            resolved: Location = known.load()(rest, run_key)
            return replace(resolved, single_writer=resolved.single_writer or self.single_writer)
        return self  # `open` raises for an unknown scheme.

    def open(self, run_key: str | None = None) -> Store:
        """Return the store of the resolved location. Raises ConfigError if the URL names no store.

        At the command line, also waits for a first answer, and raises StoreError if no answer comes in time.
        """
        location = self.resolve(run_key)
        scheme, separator, path = location.url.partition("://")
        if not separator or scheme == "file":
            local = LocalStore(path if separator else location.url)
            place = next(place for place in (local.root, *local.root.parents) if os.path.exists(place))
            if not os.path.isdir(place):
                raise ConfigError(f"{place} is a file, and a run is a directory", hint=_instead_of(str(place)))
            return _as_reached(local)
        from ckpt_tasks.storage.objects import ObjectStore  # This imports fsspec.

        store = ObjectStore(location.url, location.storage_options)
        limit_s = first_answer_s.get()
        if limit_s is not None:
            await_first_answer(store, limit_s)
        return _as_reached(store)


def _as_reached(store: Store) -> Store:
    """Add retries to the store of a server."""
    if isinstance(store, LocalStore):
        return store
    from ckpt_tasks.storage.retrying import RetryingStore

    return RetryingStore(store)


def location_of(place: str | os.PathLike[str] | Location) -> Location:
    """Return a Location unchanged; make a Location of a directory or URL. Raises ConfigError for any other type."""
    if isinstance(place, Location):
        return place
    if not isinstance(place, str | os.PathLike):
        raise ConfigError(
            f"a run's place is a directory's name, a URL or a Location, not a value of type {type(place).__name__}",
            hint="The place of a configuration is config.location.",
        )
    return Location(os.fspath(place))


def stores_below(store: Store) -> dict[str, Store]:
    """Return a store for each directory directly below a store, by name and in order; sends one listing.

    Raises StoreError if the store cannot be listed.
    """
    place = inner_store(store)
    if isinstance(place, LocalStore):
        with our_errors("", place.root):
            names = sorted(filter(None, map(_directory, os.scandir(place.root)))) if place.root.is_dir() else []
        return {name: LocalStore(Path(place.root, name)) for name in names if not name.startswith(".")}
    from ckpt_tasks.storage.objects import ObjectStore  # This imports fsspec.
    from ckpt_tasks.storage.retrying import RetryingStore

    if not isinstance(place, ObjectStore):
        return {}
    stores: dict[str, Store] = {}
    for name in place.folders():
        with suppress(ConfigError):  # Skip a name that no run can have.
            stores[name] = RetryingStore(place.below(name), deadline_s=_BELOW_S)
    return stores


def _directory(entry: os.DirEntry[str]) -> str:
    """Return the name of an entry that is a directory, else an empty text; pass over a link that leads nowhere."""
    try:
        return entry.name if entry.is_dir() else ""
    except OSError as error:
        _log.warning("%s is passed over: %s", entry.path, error.strerror)
        return ""


def free_bytes(store: Store) -> int | None:
    """Return how many bytes this user can still write on a local store's disk; its directory may be missing.

    Returns None for a server, and if the system does not tell the free space. Ignores quotas.
    """
    place = inner_store(store)
    if not isinstance(place, LocalStore):
        return None
    directory = next(path for path in (place.root, *place.root.parents) if path.exists() or path == Path("/"))
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _instead_of(file: str) -> str:
    if file.endswith(_MODELS):
        return "It looks like a saved model: torch.load or safetensors reads it."
    return "Give the run another name, or move the file away."


def _check_slashes(name: str) -> None:
    """Raise ConfigError for "s3:/bucket/run", which would otherwise name the directory ./s3:/bucket/run."""
    if doubled := _DOUBLED.match(name):
        hint = f"Write {doubled[1]}://{name[doubled.end() :]}, or ./{name} if it is a directory."
        raise ConfigError(f"{without_secrets(name)!r:.200} is not a place", hint=without_secrets(hint))
    scheme, colon, rest = name.partition(":")
    if not colon or rest.startswith("//"):
        return
    if len(scheme) > 1 and scheme.isalnum() and rest.startswith("/") and scheme not in _known():
        known = ", ".join(_known())
        hint = f"A run lies in a directory (./{name}, if it is one) or at URL://: {known}."
        raise ConfigError(f"{without_secrets(name)!r:.200} is not a place", hint=without_secrets(hint))
    if scheme == "file" or scheme in SCHEMES or entry_points(group=GROUP, name=scheme):
        name, rest = without_secrets(name), without_secrets(rest)
        do = f"Write {scheme}://{rest.lstrip('/')}, or ./{name} if it is a directory."
        if scheme == "file":
            do = f"Write {rest}, or ./{name} if it is a directory."
        raise ConfigError(f"{name!r:.200} is not a place: after {scheme} come :// and a name", hint=do)


def _known() -> list[str]:
    return ["file", *SCHEMES, *entry_points(group=GROUP).names]


_DOUBLED = re.compile(rf"({'|'.join(SCHEMES)})//+")
_PAUSE_S = 0.5
_answered: set[str] = set()  # The URLs of the stores that have answered this process.
_HINT = "Check its name, its endpoint, the credentials and the network: ckpt doctor-store tries each request."


def await_first_answer(store: Store, limit_s: float) -> None:
    """Wait until a store has answered one small request, even with a refusal.

    Returns at once if the store has answered this process before. Raises StoreError if it does not answer within
    `limit_s` seconds, ConfigError if its options are wrong.
    """
    store = inner_store(store)
    if store.url in _answered:
        return
    given_up, failure = threading.Event(), list[CkptError]()

    def ask() -> None:
        until_s = time.monotonic() + limit_s / 2
        while True:
            try:
                store.size(FORMAT_NAME)
            except CkptError as error:
                if not _is_silent(error) or time.monotonic() > until_s:
                    failure.append(error)
                    return
            else:
                return
            if given_up.wait(_PAUSE_S):
                return

    # Use a daemon thread: a search for credentials cannot be stopped, and must not delay the exit of the process.
    thread = start_thread(ask, name="ckpt-first-answer")
    thread.join(limit_s)
    given_up.set()
    if thread.is_alive():
        raise StoreError(f"{store.url} did not answer within {limit_s:.0f} s", hint=_HINT)
    for error in failure:
        if isinstance(error, ConfigError):
            raise error
        if _is_silent(error):
            raise StoreError(f"{store.url} does not answer: {error.message}", hint=_HINT) from error
    _answered.add(store.url)


def _is_silent(error: CkptError) -> bool:
    """Return True if an error is no answer; an overloaded store, which refuses, has answered."""
    return isinstance(error, StoreError) and error.transient and not error.refused
