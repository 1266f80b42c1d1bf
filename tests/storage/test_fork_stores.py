"""Forks in object stores: the server copies, nothing passes through this process, and what it cannot do is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import Checkpointer, open_run
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.checkpoint.transfer.fork import plan_fork, run_fork
from ckpt_tasks.checkpoint.transfer.transfer import Moved
from ckpt_tasks.errors import CheckpointNotFoundError, IntegrityError, StoreError
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from ckpt_tasks.storage import s3
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.port import Store
from tests.servers.s3 import S3Server
from tests.support.answers import NOT_IMPLEMENTED, SLOW_DOWN
from tests.support.chaos import Chaos
from tests.support.forks import config, train
from tests.support.rules import Fault


@pytest.fixture
def source(ministack: S3Server, bucket: str) -> Run:
    """Return a run in a bucket, with steps 2 and 4 and a part that is stored once."""
    url = f"s3://{bucket}/runs/a"
    for step in (2, 4):
        train(Location(url, storage_options=ministack.quick_options), step, {"frozen": 1 << 19})
    return open_run(Location(url, storage_options=ministack.quick_options))


def fork(source: Run, target: Store, step: int = 4) -> Moved:
    return run_fork(source, target, plan_fork(source, source.find(step), target, {"lr": 0.5}))


def good(target: Store, options: Any) -> Run:
    run = open_run(Location(target.url, storage_options=options))
    assert verify_run_directory(run.history).good
    return run


def through(chaos: Chaos, server: S3Server, source: Run, bucket: str) -> tuple[Run, Store]:
    """Return the source and an empty target, both reached behind the proxy."""
    options = server.through(chaos.endpoint).quick_options
    target = Location(f"s3://{bucket}/forks/b", storage_options=options).open()
    return open_run(Location(source.history.store.url, storage_options=options)), target


def test_the_server_copies(ministack: S3Server, bucket: str, source: Run, chaos: Chaos) -> None:
    """P30: within a store no request of ours has a shard's bytes; a copy that was refused or lost is asked for again.

    A fork that broke off before its ledger is no run, and goes on without copying again; its source may be deleted.
    """
    refused = chaos.on(Fault(answer=SLOW_DOWN), operation="CopyObject", times=1)
    lost = chaos.on(Fault(drop_answer=True), operation="CopyObject", skip=1, times=1)
    chaos.on(Fault(answer=NOT_IMPLEMENTED), operation="PutObject", key=r"forks/b/ledger")
    behind, target = through(chaos, ministack, source, bucket)
    with pytest.raises(StoreError):
        fork(behind, target)
    assert (refused.hits, lost.hits) == (1, 1)
    options = ministack.quick_options
    at = Location(target.url, storage_options=options)
    with pytest.raises(IntegrityError, match="no ledger"), Checkpointer(config(at)) as ckpt:
        ckpt.restore({})
    chaos.off()
    copies = chaos.requests(operation="CopyObject", key=r"forks/b/checkpoint_.*safetensors")
    assert all("x-amz-copy-source-if-match" in one.headers for one in copies)
    moved = fork(behind, target)
    assert chaos.requests(operation="CopyObject", key=r"forks/b/checkpoint_.*safetensors") == copies
    assert moved.linked_bytes == moved.sent_bytes == 0
    shards = chaos.requests(key=r"safetensors")
    assert max(max(one.sent_bytes, one.received_bytes) for one in shards) < 100_000  # headers are looked at
    run = good(target, options)
    assert run.head().state.params == {"frozen": 1 << 19, "lr": 0.5}
    assert run.find(4).reuses == source.find(4).reuses != ()
    for name in source.history.store.names(""):
        source.history.store.delete(name)
    with pytest.raises(CheckpointNotFoundError):
        open_run(Location(source.history.store.url, storage_options=options))
    train(at, 6, {"frozen": 1 << 19, "lr": 0.5}, max_num_checkpoints=1)
    assert [c.step for c in good(target, options).checkpoints()] == [6]


def test_other_credentials_are_another_store() -> None:
    """What one user may read, another one's copy may not: the bytes are sent then. Nothing is asked of a server."""
    name = "checkpoint_000000000001/e000001-0123456789abcdef/index.arrow"
    one, other = (Location(f"s3://bucket/{key}", storage_options={"key": key, "secret": "s"}).open() for key in "ab")
    assert not one.adopt(other, name, 1)
    assert not one.adopt(Location("memory://bucket/a").open(), name, 1)
    assert not one.adopt(Location("/tmp/a").open(), name, 1)


@pytest.mark.slow
def test_large_objects_are_copied_in_parts(
    ministack: S3Server, bucket: str, source: Run, monkeypatch: pytest.MonkeyPatch, chaos: Chaos
) -> None:
    """P42: what is too large for one request is put together on the server; a part that fails is asked for again."""
    monkeypatch.setattr(s3, "_COPIED_BYTES", 5 << 17)
    rule = chaos.on(Fault(answer=SLOW_DOWN), method="PUT", query={"partNumber": "2"}, times=1)
    behind, target = through(chaos, ministack, source, bucket)
    fork(behind, target)
    assert rule.hits == 1
    name = good(target, ministack.quick_options).find(4).reuses[0]
    found = ministack.client().head_object(Bucket=bucket, Key=f"forks/b/{name}")
    assert found["ETag"].strip('"').endswith("-4")


@pytest.mark.slow
def test_where_nobody_copies_every_byte_is_sent(
    ministack: S3Server, bucket: str, source: Run, chaos: Chaos, tmp_path: Path
) -> None:
    """A store that does not know the request, and two stores: bytes are sent and verified, and each fork is whole."""
    chaos.on(Fault(answer=NOT_IMPLEMENTED), operation="CopyObject")
    behind, target = through(chaos, ministack, source, bucket)
    moved = fork(behind, target)
    assert (moved.sent_bytes > 2 << 20, moved.copied_bytes) == (True, 0)
    down = Location(str(tmp_path / "down")).open()
    assert fork(source, down).sent_bytes > 2 << 20
    up = Location(f"s3://{bucket}/forks/up", storage_options=ministack.quick_options).open()
    assert fork(Run(good(down, None).history, "down"), up).sent_bytes > 2 << 20
    for store in (target, up):
        good(store, ministack.quick_options)
