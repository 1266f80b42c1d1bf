"""Where a run under test lies: a local directory, S3, fsspec's memory; each looked at past the code under test."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import fsspec

from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.port import Store
from tests.servers.s3 import S3Server

_numbers = count()


def _raise_unless_damaged(error: OSError) -> None:
    if error.errno != errno.EBADMSG:
        raise error


class Place(Protocol):
    """A run directory: `location` is for CheckpointConfig, `store` is a store on it.

    The rest is another client's look at it. Names are relative to the run directory.
    """

    @property
    def url(self) -> str: ...
    @property
    def location(self) -> Location: ...
    @property
    def options_json(self) -> str: ...
    @property
    def store(self) -> Store: ...

    def names(self) -> set[str]: ...
    def everything(self) -> dict[str, bytes]: ...
    def get(self, name: str) -> bytes: ...
    def put(self, name: str, data: bytes) -> None: ...
    def delete(self, name: str) -> None: ...
    def copied(self) -> Place: ...
    def remove(self) -> None: ...


@dataclass(frozen=True)
class LocalPlace:
    """A directory; hidden files count."""

    path: Path

    @property
    def url(self) -> str:
        return str(self.path)

    @property
    def location(self) -> Location:
        return Location(self.url)

    @property
    def options_json(self) -> str:
        return "null"

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.path)

    def names(self) -> set[str]:
        """List every file; a run that nobody has begun has none, nor a directory that the file system found damaged."""
        found = os.walk(self.path, onerror=_raise_unless_damaged) if self.path.exists() else ()
        return {
            os.path.relpath(os.path.join(directory, name), self.path) for directory, _, names in found for name in names
        }

    def everything(self) -> dict[str, bytes]:
        return {name: self.get(name) for name in self.names()}

    def get(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)

    def delete(self, name: str) -> None:
        (self.path / name).unlink()

    def copied(self) -> LocalPlace:
        path = self.path.parent / f"copy-{next(_numbers)}"
        shutil.copytree(self.path, path)
        return LocalPlace(path)

    def remove(self) -> None:
        if self.path.exists():
            shutil.rmtree(self.path)


@dataclass(frozen=True)
class S3Place:
    """A prefix in a bucket, seen with boto3; `through` a proxy, the code under test alone goes that way."""

    server: S3Server
    bucket: str
    prefix: str = "run"
    endpoint: str = ""

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def location(self) -> Location:
        return Location(self.url, storage_options=self._reached.quick_options)

    @property
    def options_json(self) -> str:
        """The options for another process."""
        return json.dumps(self._reached.storage_options)

    @property
    def _reached(self) -> S3Server:
        return self.server.through(self.endpoint or self.server.endpoint)

    @cached_property
    def store(self) -> Store:
        return self.location.open()  # one for all: connections cost more than what is asked here

    @cached_property
    def _client(self) -> Any:
        return self.server.client()

    def through(self, endpoint: str) -> S3Place:
        return replace(self, endpoint=endpoint)

    def names(self) -> set[str]:
        return {key.removeprefix(f"{self.prefix}/") for key in self._keys()}

    def everything(self) -> dict[str, bytes]:
        names = [*self.names()]
        with ThreadPoolExecutor(8) as threads:
            return dict(zip(names, threads.map(self.get, names), strict=True))

    def get(self, name: str) -> bytes:
        data: bytes = self._client.get_object(Bucket=self.bucket, Key=self._key(name))["Body"].read()
        return data

    def put(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.bucket, Key=self._key(name), Body=data)

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self.bucket, Key=self._key(name))

    def copied(self) -> S3Place:
        copy = S3Place(self.server, self.bucket, f"copy-{next(_numbers)}", self.endpoint)

        def one(name: str) -> None:
            source = quote(f"{self.bucket}/{self._key(name)}")
            self._client.copy_object(Bucket=self.bucket, Key=f"{copy.prefix}/{name}", CopySource=source)

        with ThreadPoolExecutor(8) as threads:
            [*threads.map(one, self.names())]
        return copy

    def remove(self) -> None:
        for page in self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{self.prefix}/"
        ):
            if found := [{"Key": held["Key"]} for held in page.get("Contents", ())]:
                self._client.delete_objects(Bucket=self.bucket, Delete={"Objects": found, "Quiet": True})

    def uploads(self) -> list[str]:
        """List the names whose multipart uploads have been begun and not ended."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self.bucket, Prefix=f"{self.prefix}/"
        )
        return [found["Key"].removeprefix(f"{self.prefix}/") for page in pages for found in page.get("Uploads", ())]

    def begin_upload(self, name: str) -> None:
        """Begin a multipart upload, as a process does that dies before it ends it."""
        self._client.create_multipart_upload(Bucket=self.bucket, Key=self._key(name))

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def _keys(self) -> Iterator[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{self.prefix}/")
        for page in pages:
            yield from (held["Key"] for held in page.get("Contents", ()))


@dataclass(frozen=True)
class MemoryPlace:
    """A directory of fsspec's memory file system: an object store without a server, in this process alone."""

    name: str = field(default_factory=lambda: f"run-{next(_numbers)}")

    @property
    def url(self) -> str:
        return f"memory://tests/{self.name}"

    @property
    def location(self) -> Location:
        return Location(self.url)

    @property
    def options_json(self) -> str:
        return "null"

    @cached_property
    def store(self) -> Store:
        return self.location.open()

    @property
    def _files(self) -> Any:
        return fsspec.filesystem("memory")

    def names(self) -> set[str]:
        base = f"/tests/{self.name}"
        return {path.removeprefix(f"{base}/") for path in self._files.find(base)} if self._files.exists(base) else set()

    def everything(self) -> dict[str, bytes]:
        return {name: self.get(name) for name in self.names()}

    def get(self, name: str) -> bytes:
        data: bytes = self._files.cat_file(f"{self.url}/{name}")
        return data

    def put(self, name: str, data: bytes) -> None:
        self._files.pipe_file(f"{self.url}/{name}", data)

    def delete(self, name: str) -> None:
        self._files.rm_file(f"{self.url}/{name}")

    def copied(self) -> MemoryPlace:
        copy = MemoryPlace()
        for name in self.names():
            copy.put(name, self.get(name))
        return copy

    def remove(self) -> None:
        if self._files.exists(self.url):
            self._files.rm(self.url, recursive=True)
