"""What the tests of S3's faults share: a place behind the chaos proxy, looked at past it with a second client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import ObjectExistsError, ObjectNotFoundError
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.ledger.history import History
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.retrying import RetryingStore
from ckpt_tasks.testing import located
from tests.servers.s3 import S3Server
from tests.support.chaos import Chaos
from tests.support.ledgers import ME, take
from tests.support.rules import Exchange

LEDGER = "/ledger/"
DATA = "/checkpoint_"

_clients: dict[str, Any] = {}  # by endpoint: making one takes as long as a test


class Past:
    """The objects below a prefix as the server has them: boto3 asks, past proxy and store."""

    endpoint = None
    near = False
    gap_bytes = 0

    def __init__(self, server: S3Server, bucket: str, prefix: str):
        self.url = f"past://{bucket}/{prefix}"
        self._client = _clients.setdefault(server.endpoint, server.client())
        self._bucket, self._prefix = bucket, f"{prefix}/"

    def get(self, name: str, max_bytes: int = 1 << 30) -> bytes:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
        except self._client.exceptions.NoSuchKey:
            raise ObjectNotFoundError("no such object", key=name) from None
        data: bytes = answer["Body"].read()
        assert len(data) <= max_bytes
        return data

    def names(self, prefix: str = "", limit: int | None = None) -> list[str]:
        below = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        pages = self._client.get_paginator("list_objects_v2").paginate(**below)
        found = [held["Key"].removeprefix(self._prefix) for page in pages for held in page.get("Contents", [])]
        return found[:limit]

    def put(self, name: str, body: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=body)

    def put_if_absent(self, name: str, body: bytes) -> None:
        try:
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=body, IfNoneMatch="*")
        except self._client.exceptions.ClientError as error:
            raise ObjectExistsError(str(error), key=name) from error

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    def uploads(self) -> list[dict[str, str]]:
        """List the multipart uploads under way."""
        answer = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=self._prefix)
        return [{"Key": one["Key"], "UploadId": one["UploadId"]} for one in answer.get("Uploads", [])]

    def clear(self) -> None:
        for name in self.names():
            self.delete(name)
        for upload in self.uploads():
            self._client.abort_multipart_upload(Bucket=self._bucket, **upload)


@dataclass
class Place:
    """Where a run lives: `server` behind `chaos`, in a bucket below a prefix."""

    server: S3Server
    chaos: Chaos
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    @cached_property
    def past(self) -> Past:
        return Past(self.server, self.bucket, self.prefix)

    @cached_property
    def truth(self) -> History:
        """The run's ledger as the server has it."""
        return History(self.past)  # type: ignore[arg-type]

    def clear(self) -> None:
        self.past.clear()

    def options(self, **config: Any) -> dict[str, Any]:
        """Return storage options that lead through the proxy; `config` are botocore's.

        The session is common to all: it has read botocore's models, which takes longer than a test.
        """
        found = self.server.through(self.chaos.endpoint).quick_options
        return {**found, "config_kwargs": {"connect_timeout": 5, "read_timeout": 10, **config}}

    def store(self, *, deadline_s: float = 20, **config: Any) -> RetryingStore:
        """Return a store behind the proxy that tries again for so many seconds."""
        return RetryingStore(ObjectStore(self.url, self.options(**config)), deadline_s=deadline_s)

    def history(self, **more: Any) -> History:
        """Return the run's ledger behind the proxy, with its first entry: ME is the owner."""
        take(self.truth, ME)
        return History(self.store(**more))

    def run(
        self,
        *,
        deadline_s: float = 20,
        take_over: bool = False,
        storage_options: dict[str, Any] | None = None,
        **more: Any,
    ) -> Checkpointer:
        """Return the run behind the proxy; nothing is kept in shared memory: what is restored comes from the store."""
        store = ObjectStore(self.url, storage_options or self.options())
        location = located(store, deadline_s=deadline_s)  # a run's own is minutes
        given = {"memory_dir": None, "max_num_checkpoints": None, **more}
        return Checkpointer(CheckpointConfig(checkpoint_dir=location, **given), take_over=take_over)

    def of_entry(self, n: int) -> list[Exchange]:
        """List the requests for one ledger entry, in the order in which they came."""
        return self.chaos.requests(key=f"^{self.prefix}/{ledger_name(n)}$")


def commits(history: History) -> list[int]:
    """List the steps that the ledger says were committed, entry by entry; every entry must be good."""
    entries = [history.read_entry(n)[0] for n in range(history.head().next_n)]
    return [int(entry.event["step"]) for entry in entries if entry.event["kind"] == "commit"]


def methods(exchanges: list[Exchange]) -> str:
    return " ".join(exchange.method for exchange in exchanges)


def state_of(value: float, size: int = 1000) -> dict[str, Any]:
    return {"weights": torch.full((size,), float(value)), "seen": [value]}


def is_state(state: dict[str, Any], value: float) -> bool:
    weights = state["weights"]
    return bool(torch.equal(weights, torch.full_like(weights, value))) and list(state["seen"]) == [value]
