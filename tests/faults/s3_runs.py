"""What the tests of S3's faults share: a place behind the chaos proxy, looked at past it with boto3."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.retrying import RetryingStore
from ckpt_tasks.testing import located
from tests.servers.s3 import S3Server
from tests.support.chaos import Chaos
from tests.support.ledgers import ME, take
from tests.support.places import S3Place
from tests.support.rules import Exchange, Fault

LEDGER = "/ledger/"


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
    def past(self) -> S3Place:
        """The objects as the server has them."""
        return S3Place(self.server, self.bucket, self.prefix)

    @cached_property
    def truth(self) -> History:
        """The run's ledger, read and written past the proxy."""
        return History(self.past.store)

    def options(self, **config: Any) -> dict[str, Any]:
        """Return storage options that lead through the proxy; `config` are botocore's."""
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
        location = located(ObjectStore(self.url, storage_options or self.options()), deadline_s=deadline_s)
        given = {"memory_dir": None, "max_num_checkpoints": None, **more}
        return Checkpointer(CheckpointConfig(checkpoint_dir=location, **given), take_over=take_over)

    def asked(self, **match: Any) -> str:
        """Return the operations so far that match, in the order in which they came."""
        return " ".join(one.operation for one in self.chaos.requests(**match))

    def of_entry(self, n: int) -> list[Exchange]:
        """List the requests for one ledger entry."""
        return self.chaos.requests(key=f"^{self.prefix}/{ledger_name(n)}$")


def named(it: object) -> str | None:
    """Name a fault in a test's id."""
    if not isinstance(it, Fault):
        return None
    return "-".join([*it.names(), *([str(it.answer.status)] if it.answer else [])])


def commits(history: History) -> list[int]:
    """List the steps that the ledger says were committed, entry by entry; every entry must be good."""
    entries = [history.read_entry(n)[0] for n in range(history.head().next_n)]
    return [int(entry.event["step"]) for entry in entries if entry.event["kind"] == "commit"]


def state_of(value: float, size: int = 1000) -> dict[str, Any]:
    return {"weights": torch.full((size,), float(value)), "seen": [value]}


def is_state(state: dict[str, Any], value: float) -> bool:
    weights = state["weights"]
    return bool(torch.equal(weights, torch.full_like(weights, value))) and list(state["seen"]) == [value]
