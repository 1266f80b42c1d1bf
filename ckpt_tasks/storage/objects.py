"""An object store below a prefix: S3 and compatible servers, Azure and Google through fsspec.

Invariants

1. A request is sent once. `retrying.py` decides about retries; the caller decides about retries of a commit.
2. `put_if_absent` is one small request with a condition that the server checks, never a check followed by a write
   (except if the run's creator set `single_writer`, because the store has no such condition).
3. The store caches neither listings nor file-system instances; a forked process opens its own connections.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

import fsspec
from fsspec.asyn import sync

from ckpt_tasks.errors import CkptError, ConfigError, ObjectExistsError, ObjectNotFoundError
from ckpt_tasks.format.keys import is_object_name
from ckpt_tasks.storage.answers import as_ours, is_expired, of_listing
from ckpt_tasks.storage.loop import io_loop
from ckpt_tasks.storage.others import OtherRequests, drive
from ckpt_tasks.storage.port import SCHEMES, Store, base_of, check_name, moved
from ckpt_tasks.storage.s3 import S3Requests, sending_once
from ckpt_tasks.storage.secrets import Redactor, without_secrets
from ckpt_tasks.system import keep_out_of_streams

_EXTRAS = {"abfs": "azure", "gs": "gcs"}
_LIBRARIES = ("adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs", "urllib3")
# Notice a stalled connection within seconds. The client must not retry: that hides failures and repeats commits.
_S3_CONFIG = {"connect_timeout": 5, "read_timeout": 20, "max_pool_connections": 32}
# Do not sign bodies: over TLS no client signs them; without TLS the CRC in the signed headers protects the body, and a
# hash would take a third of an upload's time.
_S3_SIGNING = {"payload_signing_enabled": False}
_ONCE = {"retries": {"total_max_attempts": 1, "mode": "standard"}}  # These settings override the user's options.
# fsspec's memory file system checks for the name, then writes: this lock makes both one step.
_IN_MEMORY = threading.Lock()

_LEAST_GAP_BYTES, _MOST_GAP_BYTES = 64 << 10, 8 << 20

_stores: WeakSet[ObjectStore] = WeakSet()
_inherited: list[object] = []

_T = TypeVar("_T")


Requests = S3Requests | OtherRequests  # Both classes send each request once.


class ObjectStore:
    """Keeps objects below a URL like s3://bucket/run-7; see `Store` for the contract of each method.

    `storage_options` go to the file system of fsspec (s3fs, adlfs, gcsfs); without them the client looks for
    credentials in a profile, the environment or an instance role.
    """

    near = False

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        parts, shown = urlsplit(url), without_secrets(url)
        if "@" in url:  # A secret may contain a slash, so its end is unknown.
            hint = "Credentials come from storage_options, a profile or the environment: write s3://bucket/directory."
            raise ConfigError("a place for checkpoints has no @ in its URL, and no user or password", hint=hint)
        # fsspec would interpret some URLs differently (simplecache::http://…).
        if parts.scheme not in SCHEMES or "::" in url or parts.query or parts.fragment or ":" in parts.netloc:
            raise ConfigError(f"{shown!r:.200} is not a place for checkpoints", hint="Write s3://bucket/directory.")
        prefix = parts.path.strip("/")
        if not parts.netloc or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
            raise ConfigError(f"{shown!r:.200} names no bucket and directory", hint="Write s3://bucket/directory.")
        self.url = f"{parts.scheme}://{parts.netloc}/{prefix}".rstrip("/")
        self._protocol = SCHEMES[parts.scheme]
        self._bucket = parts.netloc
        self._prefix = f"{prefix}/" if prefix else ""
        self._options = dict(storage_options or {})
        self._redactor = Redactor(self._options)
        self._class = self._file_system()
        self._single_writer = False
        self._opening = threading.Lock()
        self._opened: tuple[Any, Requests] | None = None
        _stores.add(self)
        self._measured = _Measured()

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.url, self._options)

    @property
    def gap_bytes(self) -> int:
        """Latency × bandwidth of earlier requests: reading so many unneeded bytes takes as long as another request."""
        return self._measured.gap_bytes

    @property
    def endpoint(self) -> str:
        """The server's URL if the options name one, else the protocol's default."""
        options, client = self._options, self._options.get("client_kwargs") or {}
        named = options.get("endpoint_url") or client.get("endpoint_url") or options.get("connection_string")
        if self._protocol == "s3":
            named = named or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return _host(str(named)) if named else self._protocol

    def put(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        key = self._key(name)
        pieces = [memoryview(piece).cast("B") for piece in body]
        self._write(name, key, pieces)

    def put_if_absent(self, name: str, body: bytes) -> None:
        self._write(name, self._key(name), [memoryview(body)])

    def adopt(self, source: Store, name: str, size_bytes: int) -> bool:
        if not isinstance(source, ObjectStore) or not self._reaches(source):
            return False
        with suppress(ObjectNotFoundError):
            return self.size(name) == size_bytes  # An earlier try made the copy; a copy is never partial.
        theirs, key = source._key(name), self._key(name)
        return self._run(name, lambda requests: requests.copy(source._bucket, theirs, key, size_bytes))

    def replace(self, name: str, body: bytes) -> None:
        key = self._key(name)
        self._run(name, lambda requests: requests.put(key, [memoryview(body)], absent=False))

    def get(self, name: str, max_bytes: int) -> bytes:
        key = self._key(name)
        return self._run(name, lambda requests: requests.get(key, max_bytes))

    def read(self, name: str, begin: int, into: memoryview) -> None:
        key = self._key(name)
        if not into.nbytes:
            self.size(name)  # No request can ask for zero bytes: only check that the object exists.
            return
        began = time.perf_counter()
        self._run(name, lambda requests: requests.read(key, begin, into))
        self._measured.add(into.nbytes, time.perf_counter() - began)

    def size(self, name: str) -> int:
        key = self._key(name)
        return self._run(name, lambda requests: requests.size(key))

    def sizes(self, names: Sequence[str]) -> list[int]:
        keys = {self._key(name): name for name in names}
        sizes: list[int] = []
        for key, size_bytes in self._run("", lambda requests: requests.sizes([*keys])).items():
            if isinstance(size_bytes, BaseException):
                raise self._ours(size_bytes, as_ours(size_bytes, keys[key]))
            sizes.append(size_bytes)
        return sizes

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        base = base_of(prefix)
        if limit == 0:
            return []
        below = self._prefix + (f"{base}/" if base else "")
        cut = len(self._prefix)

        def enough(keys: Iterable[str]) -> bool:
            return limit is not None and sum(is_object_name(key[cut:]) for key in keys) >= limit

        page = 1000 if limit is None else limit
        keys = self._run(prefix, lambda requests: requests.keys(below, enough, page), of_listing)
        return sorted(key[cut:] for key in keys if is_object_name(key[cut:]))[:limit]

    def delete(self, name: str) -> None:
        key = self._key(name)
        try:
            self._run(name, lambda requests: requests.delete(key))
        except ObjectNotFoundError:
            return

    def delete_all(self, names: Sequence[str]) -> dict[str, CkptError]:
        keys = {self._key(name): name for name in names}
        refused = self._run("", lambda requests: requests.delete_all([*keys]))
        errors = {keys[key]: self._ours(error, as_ours(error, keys[key])) for key, error in refused.items()}
        return {name: error for name, error in errors.items() if not isinstance(error, ObjectNotFoundError)}

    def drop_unfinished(self, dead: Callable[[str], bool]) -> None:
        cut = len(self._prefix)
        self._run("", lambda requests: requests.abort_uploads(self._prefix, lambda key: dead(key[cut:])))

    def assume_single_writer(self) -> None:
        self._single_writer = True

    def keep_room(self) -> None:
        """Do nothing: an object store does not fill up."""

    def folders(self) -> list[str]:
        """List the folders directly below this prefix; one request returns many names."""
        keys = self._run("", lambda requests: requests.folders(self._prefix), of_listing)
        return sorted(key[len(self._prefix) :].rstrip("/") for key in keys)

    def below(self, name: str) -> ObjectStore:
        """Return the store for a name directly below this store; it uses the same connections."""
        store = ObjectStore(f"{self.url}/{name}", self._options)
        store._opened = self._requests()
        return store

    # ── private helpers ──────────────────────────────────────────────────────────────────────────────────────

    def _reaches(self, other: ObjectStore) -> bool:
        """Return True if another store is on the same server, with the same credentials."""
        places = ((self._protocol, self.endpoint, self._options), (other._protocol, other.endpoint, other._options))
        return places[0] == places[1]

    def _write(self, name: str, key: str, pieces: Sequence[memoryview]) -> None:
        absent = not self._single_writer
        if self._single_writer:
            with suppress(ObjectNotFoundError):
                self.size(name)
                raise ObjectExistsError("the object exists already", key=name)
        self._run(name, lambda requests: requests.put(key, pieces, absent=absent))

    def _key(self, name: str) -> str:
        check_name(name)
        return self._prefix + name

    def _run(self, name: str, work: Callable[[Requests], Coroutine[Any, Any, _T]], translate: Any = as_ours) -> _T:
        try:
            fs, requests = self._requests()
            if fs.async_impl:
                result: _T = sync(fs.loop, lambda: work(requests))
                moved()
                return result
            with _IN_MEMORY:
                return drive(work(requests))
        except Exception as error:  # noqa: BLE001 (it becomes one of ours, which is raised below)
            failure = self._ours(error, translate(error, name))
        failure.__context__ = None
        raise failure  # Raise outside `except`: otherwise Python sets the client's error as context.

    def _ours(self, error: BaseException, ours: CkptError) -> CkptError:
        """Remove secrets from our error, and attach the client's error as its cause, without secrets."""
        if is_expired(error):
            self._opened = None  # The next try reads the credentials again.
        ours.message = self._redactor.text(ours.message)
        ours.args = (ours.message,)
        if ours is not error or ours.__cause__ is not None:
            ours.__cause__ = self._redactor.cause(ours.__cause__ or error)
        return ours.with_traceback(None)

    def _requests(self) -> tuple[Any, Requests]:
        with self._opening:
            if self._opened is None:
                fs = self._open()
                keep_out_of_streams(*_LIBRARIES)
                requests = S3Requests(fs, self._bucket) if self._protocol == "s3" else OtherRequests(fs, self._bucket)
                self._opened = (fs, requests)
            return self._opened

    def _leave_to_parent(self) -> None:
        """Forget the connections in a forked child; closing them would disturb the parent's event loop."""
        _inherited.append(self._opened)
        self._opening, self._opened = threading.Lock(), None

    def _file_system(self) -> Any:
        """Import the file system's class, and restore Python's random stream, which belongs to training.

        s3fs imports rich, which draws a random number (found with rich 15.0). Call this function while the store is
        made: a background thread must not restore the stream.
        """
        state = random.getstate()
        try:
            if self._protocol == "s3":
                import s3fs  # The import takes a quarter of a second.

                return s3fs.S3FileSystem
            return fsspec.get_filesystem_class(self._protocol)
        except ImportError as error:
            extra = _EXTRAS.get(self._protocol, self._protocol)
            raise ConfigError(f"{self.url} needs pip install 'ckpt-tasks[{extra}]'") from error
        finally:
            random.setstate(state)

    def _open(self) -> Any:
        options = {**self._options, "skip_instance_cache": True, "use_listings_cache": False, "loop": io_loop()}
        session = sending_once() if self._protocol == "s3" else None
        try:
            if session is not None:
                once = {**_ONCE, "http_session_cls": session}
                users = self._options.get("config_kwargs") or {}
                signing = {"s3": {**_S3_SIGNING, **(users.get("s3") or {})}}
                options["config_kwargs"] = {**_S3_CONFIG, **users, **signing, **once}
                fs = self._class(**options)
                sync(fs.loop, fs.set_session)  # The client checks the options only here.
                return fs
            return self._class(**options)
        except (TypeError, ValueError) as error:
            why = self._redactor.text(str(error))
            hint = (
                "An endpoint begins with https:// or http://, in AWS_ENDPOINT_URL too." if "endpoint" in why else None
            )
            raise ConfigError(f"storage_options are not what {self._protocol} takes: {why}", hint=hint) from None


class _Measured:
    """The cost of a request: the shortest latency, and the bandwidth of the fastest large request."""

    def __init__(self) -> None:
        self._latency_s = 0.05
        self._bandwidth = 50e6  # The unit is bytes per second.
        self._seen = False

    @property
    def gap_bytes(self) -> int:
        return min(max(int(self._latency_s * self._bandwidth), _LEAST_GAP_BYTES), _MOST_GAP_BYTES)

    def add(self, size_bytes: int, took_s: float) -> None:
        if size_bytes <= _LEAST_GAP_BYTES:
            self._latency_s = min(self._latency_s, took_s) if self._seen else took_s
            self._seen = True
        elif took_s > self._latency_s:
            self._bandwidth = max(self._bandwidth, size_bytes / (took_s - self._latency_s))


def _host(endpoint: str) -> str:
    """Return scheme, host and port of an endpoint, but no credentials or keys."""
    parts = urlsplit(endpoint)
    if not parts.hostname:
        return "named"
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def _after_fork() -> None:
    for store in _stores:
        store._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
