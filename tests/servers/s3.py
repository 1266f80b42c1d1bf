"""S3 servers of a test run: ministack, which keeps its conditions to the letter, and rclone's, which does not."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.servers.process import NotProvisionedError, NotReadyError, on_free_port, tied, token, wait_until

REGION = "us-east-1"
BUCKETS = f"test-{os.getpid()}-"  # how the buckets of this process's tests begin
# ministack pins another botocore than s3fs, so the programs have a virtual environment of their own.
PROGRAMS = Path(sys.prefix, "servers", "bin")

_LOCK = threading.Lock()  # clients may be shared by threads, the session that makes them may not


@cache
def _session() -> Any:
    """Return the one session of this process: it reads the long description of S3 once, not for every client."""
    import boto3  # here: every test session imports this module, few need a server

    return boto3.session.Session()


@cache
def _aio_session() -> Any:
    """Return the same for s3fs: aiobotocore's session."""
    from aiobotocore.session import AioSession  # type: ignore[import-untyped]

    return AioSession()


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """Where a server answers and whom it lets in. Addresses are path-style: `endpoint/bucket/key`."""

    name: str
    endpoint: str
    key: str
    secret: str = field(repr=False)
    pid: int
    lists_uploads: bool = True

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for s3fs: never a stale listing or instance, and every wait has an end."""
        return {
            "key": self.key,
            "secret": self.secret,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": REGION},
            "config_kwargs": {
                "connect_timeout": 5,
                "read_timeout": 20,
                "retries": {"max_attempts": 3, "mode": "standard"},
            },
            "use_listings_cache": False,
            "skip_instance_cache": True,
        }

    @property
    def quick_options(self) -> dict[str, Any]:
        """Options for stores of this process: with the common session a store is made in a moment, and not in 0.5 s."""
        return {**self.storage_options, "session": _aio_session()}

    @property
    def environment(self) -> dict[str, str]:
        """The variables that tell a client where the server is, and who asks."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": REGION,
        }

    def through(self, endpoint: str) -> S3Server:
        """Return the same server as it is seen through a proxy."""
        return replace(self, endpoint=endpoint)

    def client(self, **config: Any) -> Any:
        """Return a boto3 client that sends each request once and waits for 20 s; `config` overrides."""
        from botocore.client import Config

        options = {"retries": {"total_max_attempts": 1}, "connect_timeout": 5, "read_timeout": 20, **config}
        with _LOCK:
            return _session().client(
                "s3",
                endpoint_url=self.endpoint,
                aws_access_key_id=self.key,
                aws_secret_access_key=self.secret,
                region_name=REGION,
                config=Config(max_pool_connections=32, **options),
            )

    @contextmanager
    def fresh_bucket(self) -> Iterator[str]:
        """Make a bucket that nobody has used; on leaving, delete it with all it holds: servers keep it in memory."""
        client, name = self.client(), f"{BUCKETS}{token()}"
        client.create_bucket(Bucket=name)
        yield name
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
            if found := [{"Key": held["Key"]} for held in page.get("Contents", [])]:
                client.delete_objects(Bucket=name, Delete={"Objects": found, "Quiet": True})
        uploads = client.list_multipart_uploads(Bucket=name).get("Uploads", []) if self.lists_uploads else []
        for upload in uploads:
            client.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])
        client.delete_bucket(Bucket=name)


def program(name: str) -> Path:
    """Return the path of a server that `make test` brings."""
    path = PROGRAMS / name
    if not path.exists():
        raise NotProvisionedError(f"{path} is missing: `make test` brings it")
    return path


def answers_us(server: S3Server) -> None:
    """Send a signed request: only the server that was given these credentials accepts it."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        server.client(connect_timeout=2, read_timeout=10).list_buckets()
    except (BotoCoreError, ClientError) as error:
        raise NotReadyError(str(error)) from error


def ministack(place: Path) -> AbstractContextManager[S3Server]:
    """Run ministack: exact conditional puts, checksums verified, all in memory; signatures in addresses alone."""
    return on_free_port(partial(_ministack, program("ministack"), place))


@contextmanager
def _ministack(path: Path, place: Path, port: int) -> Iterator[S3Server]:
    key, secret, endpoint, log = token(), token(), f"http://127.0.0.1:{port}", place / "ministack.log"
    environment = {
        "GATEWAY_PORT": str(port),
        "BIND_HOST": "127.0.0.1",  # all interfaces otherwise
        "SERVICES": "s3",
        "S3_PERSIST": "0",
        "LOG_LEVEL": "WARNING",
        "TMPDIR": str(place),
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "MINISTACK_EDITION": key,  # it reports this word of ours: so we know that it is ours
    }

    def ready() -> None:
        with urlopen(f"{endpoint}/_ministack/health", timeout=10) as answer:
            if json.load(answer).get("edition") != key:
                raise NotReadyError("somebody else's")

    with tied([path], environment=environment, log=log) as process:
        wait_until(ready, process, log, timeout_s=60)
        yield S3Server(name="ministack", endpoint=endpoint, key=key, secret=secret, pid=process.pid)


def liar(place: Path) -> AbstractContextManager[S3Server]:
    """Run rclone's S3 server over a directory: it accepts every precondition and heeds none."""
    return on_free_port(partial(_liar, program("rclone"), place))


@contextmanager
def _liar(path: Path, place: Path, port: int) -> Iterator[S3Server]:
    key, secret, log = token(), token(), place / "rclone.log"
    held = place / "buckets"
    held.mkdir(exist_ok=True)
    command: list[str | Path] = [
        path,
        "serve",
        "s3",
        held,
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{key},{secret}",
    ]
    command += ["--vfs-cache-mode", "off", "--dir-cache-time", "0"]
    with tied(command, environment={"RCLONE_CONFIG": ""}, log=log) as process:
        endpoint = f"http://127.0.0.1:{port}"
        server = S3Server(
            name="rclone serve s3", endpoint=endpoint, key=key, secret=secret, pid=process.pid, lists_uploads=False
        )
        wait_until(partial(answers_us, server), process, log, timeout_s=60)
        yield server
