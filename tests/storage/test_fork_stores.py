"""Forks in object stores: the server copies, nothing passes through this process, and what it cannot do is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import Checkpointer, open_run
from ckpt_tasks.copying.fork import plan_fork, run_fork
from ckpt_tasks.copying.transfer import Moved
from ckpt_tasks.errors import CheckpointNotFoundError, IntegrityError, StoreError
from ckpt_tasks.reading.reading import Run
from ckpt_tasks.session.forked import fork_run
from ckpt_tasks.storage import s3
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.port import Store
from ckpt_tasks.upkeep.upkeep import verify_run_directory
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


def target_of(server: S3Server, bucket: str, name: str = "b") -> Store:
    return Location(f"s3://{bucket}/forks/{name}", storage_options=server.quick_options).open()


def fork(source: Run, target: Store, step: int = 4) -> Moved:
    return run_fork(source, target, plan_fork(source, source.find(step), target, {"lr": 0.5}))


def good(target: Store, options: Any) -> Run:
    run = open_run(Location(target.url, storage_options=options))
    assert verify_run_directory(run.history).good
    return run


def test_the_server_copies(ministack: S3Server, bucket: str, source: Run, chaos: Chaos) -> None:
    """Within a store every shard is copied by the server: no request of ours has a shard's bytes, there or back."""
    proxied = ministack.through(chaos.endpoint).quick_options
    through = open_run(Location(source.history.store.url, storage_options=proxied))
    target = Location(f"s3://{bucket}/forks/b", storage_options=proxied).open()
    moved = fork(through, target)
    assert moved.copied_bytes > 2 << 20
    assert moved.linked_bytes == moved.sent_bytes == 0
    copies = chaos.requests(operation="CopyObject", key=r"forks/b/checkpoint_.*safetensors")
    assert copies
    assert all("x-amz-copy-source-if-match" in one.headers for one in copies)
    shards = chaos.requests(key=r"safetensors")
    assert max(one.sent_bytes for one in shards) < 100_000  # headers are looked at
    assert max(one.received_bytes for one in shards) < 100_000
    run = good(target, ministack.quick_options)
    assert run.head().state.params == {"frozen": 1 << 19, "lr": 0.5}
    assert run.find(4).reuses == source.find(4).reuses != ()


def test_other_credentials_are_another_store() -> None:
    """What one user may read, another one's copy may not: the bytes are sent then. Nothing is asked of a server."""
    name = "checkpoint_000000000001/e000001-0123456789abcdef/index.arrow"
    one, other = (Location(f"s3://bucket/{key}", storage_options={"key": key, "secret": "s"}).open() for key in "ab")
    assert not one.adopt(other, name, 1)
    assert not one.adopt(Location("memory://bucket/a").open(), name, 1)
    assert not one.adopt(Location("/tmp/a").open(), name, 1)


def test_large_objects_are_copied_in_parts(
    ministack: S3Server, bucket: str, source: Run, monkeypatch: pytest.MonkeyPatch, chaos: Chaos
) -> None:
    """P42: what is too large for one request is put together on the server; a part that fails is asked for again."""
    monkeypatch.setattr(s3, "_COPIED_BYTES", 5 << 17)
    proxied = ministack.through(chaos.endpoint).quick_options
    rule = chaos.on(Fault(answer=SLOW_DOWN), method="PUT", query={"partNumber": "2"}, times=1)
    target = Location(f"s3://{bucket}/forks/b", storage_options=proxied).open()
    fork(open_run(Location(source.history.store.url, storage_options=proxied)), target)
    assert rule.hits == 1
    run = good(target, ministack.quick_options)
    name = run.find(4).reuses[0]
    found = ministack.client().head_object(Bucket=bucket, Key=f"forks/b/{name}")
    assert found["ETag"].strip('"').endswith("-4")


def test_a_server_without_copies_is_sent_the_bytes(ministack: S3Server, bucket: str, source: Run, chaos: Chaos) -> None:
    """A store that does not know the request gets the bytes, verified as `ckpt sync` does it."""
    chaos.on(Fault(answer=NOT_IMPLEMENTED), operation="CopyObject")
    proxied = ministack.through(chaos.endpoint).quick_options
    target = Location(f"s3://{bucket}/forks/b", storage_options=proxied).open()
    moved = fork(open_run(Location(source.history.store.url, storage_options=proxied)), target)
    assert moved.sent_bytes > 2 << 20
    assert moved.copied_bytes == 0
    good(target, ministack.quick_options)


def test_lost_and_refused_copies_are_asked_for_again(
    ministack: S3Server, bucket: str, source: Run, chaos: Chaos
) -> None:
    """P30: a copy that was refused, or whose answer was lost, is made once more; the fork is whole."""
    refused = chaos.on(Fault(answer=SLOW_DOWN), operation="CopyObject", times=1)
    lost = chaos.on(Fault(drop_answer=True), operation="CopyObject", skip=1, times=1)
    proxied = ministack.through(chaos.endpoint).quick_options
    target = Location(f"s3://{bucket}/forks/b", storage_options=proxied).open()
    fork(open_run(Location(source.history.store.url, storage_options=proxied)), target)
    assert (refused.hits, lost.hits) == (1, 1)
    good(target, ministack.quick_options)


def test_a_fork_stands_alone(ministack: S3Server, bucket: str, source: Run) -> None:
    """The source's objects are deleted, all of them; the fork verifies, trains on, prunes what it began with."""
    options = ministack.quick_options
    target = target_of(ministack, bucket)
    fork(source, target)
    for name in source.history.store.names(""):
        source.history.store.delete(name)
    with pytest.raises(CheckpointNotFoundError):
        open_run(Location(source.history.store.url, storage_options=options))
    good(target, options)
    train(Location(target.url, storage_options=options), 6, {"frozen": 1 << 19, "lr": 0.5}, max_num_checkpoints=1)
    assert [c.step for c in good(target, options).checkpoints()] == [6]


def test_a_fork_that_broke_off_goes_on(ministack: S3Server, bucket: str, source: Run, chaos: Chaos) -> None:
    """P30: what was copied before is found by its name and size, and not copied again."""
    chaos.on(Fault(answer=NOT_IMPLEMENTED), operation="PutObject", key=r"forks/b/ledger")
    proxied = ministack.through(chaos.endpoint).quick_options
    target = Location(f"s3://{bucket}/forks/b", storage_options=proxied).open()
    through = open_run(Location(source.history.store.url, storage_options=proxied))
    with pytest.raises(StoreError):
        fork(through, target)
    assert not target.names("ledger/")
    with (
        pytest.raises(IntegrityError, match="no ledger"),
        Checkpointer(config(Location(target.url, storage_options=proxied))) as c,
    ):
        c.restore({})
    chaos.off()
    copies = len(chaos.requests(operation="CopyObject"))
    fork(through, target)
    assert len(chaos.requests(operation="CopyObject")) == copies
    good(target, ministack.quick_options)


def test_between_stores_every_byte_is_verified(ministack: S3Server, bucket: str, source: Run, tmp_path: Path) -> None:
    """From a server to a disk, and back: bytes are sent, and each fork is whole."""
    down = Location(str(tmp_path / "down")).open()
    assert fork(source, down).sent_bytes > 2 << 20
    good(down, None)
    up = target_of(ministack, bucket, "up")
    assert fork(Run(good(down, None).history, "down"), up).sent_bytes > 2 << 20
    good(up, ministack.quick_options)


def test_a_flow_forks_within_a_store(ministack: S3Server, bucket: str, source: Run) -> None:
    """`fork_run` reaches the source with the options of the run itself; no option is written down."""
    options = ministack.quick_options
    location = Location(f"s3://{bucket}/forks/c", storage_options=options)
    fork_run(f"{source.history.store.url}@2", config(location), {"lr": 0.5})
    run = open_run(location)
    assert [c.step for c in run.checkpoints()] == [2]
    entries = b"".join(run.history.store.get(name, 1 << 20) for name in run.history.store.names("ledger/"))
    assert ministack.secret.encode() not in entries
    assert ministack.key.encode() not in entries
