"""`ckpt doctor-store`: what is said of a store is what the store does, and nothing of the trial is left."""

from __future__ import annotations

import secrets
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.cli.doctor import measuring
from ckpt_tasks.cli.doctor.findings import EXCLUSIVE, Ability, Findings, judge
from ckpt_tasks.cli.doctor.measuring import try_store
from ckpt_tasks.errors import StoreError
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.port import Store, WrappedStore
from tests.servers.s3 import S3Server
from tests.support.answers import ACCESS_DENIED, NOT_IMPLEMENTED, SLOW_DOWN
from tests.support.chaos import Chaos
from tests.support.cli_runs import ckpt, save_steps, started, tree
from tests.support.liars import IgnoresRanges, ListsInNoOrder, Overwrites
from tests.support.rules import Fault, Gate
from tests.support.sweeps import quick_first
from tests.support.systems import Waited, running_on
from tests.support.waiting import until

LARGE_BYTES = 17 << 20  # two parts
NEEDED = ["list", "write", "delete", "read", "ordered listing", "ranged reads", EXCLUSIVE, "large objects"]


def keys(server: S3Server, bucket: str) -> list[str]:
    """Return all that is in a bucket, half-made objects included."""
    client = server.client()
    found = [one["Key"] for one in client.list_objects_v2(Bucket=bucket).get("Contents", [])]
    return found + [one["Key"] for one in client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]


def through(chaos: Chaos, server: S3Server, bucket: str) -> ObjectStore:
    return ObjectStore(f"s3://{bucket}/run", server.through(chaos.endpoint).quick_options)


# ── directories ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_directory(run_dir: Path, tmp_path: Path) -> None:
    """Not a byte of a run changes, and a place that is not there is gone again."""
    before = tree(save_steps(run_dir, 1, 2))
    assert judge(try_store(LocalStore(run_dir), large_bytes=1 << 20)).fit
    assert tree(run_dir) == before
    answer = ckpt("doctor-store", tmp_path / "a" / "b", "--json")
    assert answer.status == 0
    assert [*tmp_path.iterdir()] == [run_dir]
    found = answer.data
    assert found["disk"]["free_bytes"] > 0
    assert found["disk"]["link"]["works"] is True


def test_a_disk_that_is_nearly_full_is_not_filled(tmp_path: Path) -> None:
    """P37: where a large object would take what a run may need, none is tried, and that is said."""
    found = try_store(LocalStore(tmp_path / "run"), large_bytes=1 << 50)
    assert found.abilities["large objects"].works is None
    assert "not tried" in found.abilities["large objects"].seen
    assert judge(found).fit


# ── object stores ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_store_that_keeps_its_conditions(ministack: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P31: a server with exact conditions is fit, also for large objects; what was written is gone."""
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    answer = ckpt("doctor-store", f"s3://{bucket}/run", "--json")
    assert answer.status == 0, answer.out
    found = answer.data
    assert (found["endpoint"], found["disk"]) == (ministack.endpoint, None)
    assert [*found["abilities"]] == [*NEEDED, "conditional multipart"]
    assert found["abilities"]["conditional multipart"]["works"] is True
    assert keys(ministack, bucket) == []
    answer = ckpt("doctor-store", f"s3://{bucket}-not-there/run")
    assert answer.status == 1
    assert "NoSuchBucket" in answer.out


@pytest.mark.slow
def test_a_server_that_ignores_conditions_of_large_objects(ceph: S3Server) -> None:
    """P31: Ceph heeds the condition of a small object, which is what commits are: it is fit, and the rest is told."""
    with ceph.fresh_bucket() as bucket:
        found = try_store(ObjectStore(f"s3://{bucket}/run", ceph.storage_options), large_bytes=LARGE_BYTES)
        assert judge(found).fit
        assert found.abilities["conditional multipart"] == Ability(False, "a second one takes the place of the first")
        assert keys(ceph, bucket) == []


class Late(WrappedStore):
    """Show in listings what was there before the last change."""

    def __init__(self, inner: Store):
        super().__init__(inner)
        self._before: list[str] = []

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        before, self._before = self._before, super().names(prefix, limit)
        return before


@pytest.mark.parametrize(
    ("harm", "words"),
    quick_first(
        [
            (Overwrites, "only with single_writer=True: a second writer replaces what the first one wrote"),
            (Late, "not fit: "),
            (ListsInNoOrder, "not fit: it does not list in order, at once, what is there"),
            (IgnoresRanges, "not fit: parts of an object cannot be read"),
        ],
        2,
    ),
)
def test_a_store_that_misbehaves(harm: type[WrappedStore], words: str) -> None:
    """P31, P37: whatever a store gets wrong of what checkpoints rest on, the verdict names it, and nothing is left."""
    inner = ObjectStore(f"memory://doctor/{secrets.token_hex(8)}")
    found = try_store(harm(inner), large_bytes=1 << 20)
    verdict = judge(found)
    assert not verdict.fit
    assert verdict.words.startswith(words)
    assert inner.names("") == []


@pytest.mark.parametrize(
    ("fault", "where", "words", "left"),
    quick_first([
        (NOT_IMPLEMENTED, {"headers": {"if-none-match": "."}}, "only with single_writer=True: the store answered 5", 0),
        (ACCESS_DENIED, {"operation": "DeleteObject"}, "not fit: nothing can be deleted", 2),
        (ACCESS_DENIED, {"operation": "PutObject"}, "not fit: it cannot be written to (the store answered 403 Acc", 0),
    ]),
)  # fmt: skip
def test_a_store_that_refuses(  # noqa: PLR0917 (fixtures)
    ministack: S3Server, bucket: str, chaos: Chaos, fault: Any, where: dict[str, Any], words: str, left: int
) -> None:
    """P31: without the condition all else is tried for a single writer; a trial that stops says what it has left."""
    chaos.on(Fault(answer=fault), **where)
    found = try_store(through(chaos, ministack, bucket), large_bytes=LARGE_BYTES)
    assert judge(found).words.startswith(words)
    assert ("large objects" in found.abilities) == (fault is NOT_IMPLEMENTED)
    assert "conditional multipart" not in found.abilities
    assert [f"run/{name}" for name in found.left] == keys(ministack, bucket)
    assert len(found.left) == left


@pytest.mark.slow
def test_a_storm_is_no_lack(ministack: S3Server, bucket: str, chaos: Chaos, monkeypatch: pytest.MonkeyPatch) -> None:
    """P32: a store that is too busy to be tried is an error, not one without conditions; nothing is left."""
    monkeypatch.setattr(measuring, "_PATIENCE_S", 0.2)
    chaos.on(Fault(answer=SLOW_DOWN), headers={"if-none-match": "."})
    with pytest.raises(StoreError, match="SlowDown"):
        try_store(through(chaos, ministack, bucket), large_bytes=LARGE_BYTES)
    assert keys(ministack, bucket) == []


@pytest.mark.slow
def test_nobody_answers() -> None:
    """A server that is not there is said after seconds of trying, by the doctor's clock, not after minutes."""
    store = ObjectStore("s3://bucket/run", {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"})
    with running_on(Waited()) as waited:
        verdict = judge(try_store(store))
    assert verdict.words.startswith("not fit: it cannot be listed (no answer from the store")
    assert waited.waited_s < 60


# ── Ctrl-C ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    """P30: Ctrl-C in the middle ends it with another status than 0, and nothing of the trial is there."""
    with started("doctor-store", tmp_path / "a" / "run") as process:
        until(lambda: [*tmp_path.glob("a/run/probe/*/*")])
        process.send(signal.SIGINT)
        assert process.wait() != 0
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_an_interrupt_in_an_upload_leaves_nothing(ministack: S3Server, bucket: str, chaos: Chaos) -> None:
    """P38: Ctrl-C while a large object goes up: neither the object nor the upload is there, not even late."""
    gate = Gate()
    chaos.on(Fault(hold_request=gate), operation="UploadPart", times=1)
    with started(
        "doctor-store", f"s3://{bucket}/run", environment=ministack.through(chaos.endpoint).environment
    ) as process:
        assert gate.reached.wait(120)
        process.send(signal.SIGINT)
        until(lambda: chaos.requests(operation="AbortMultipartUpload"))
        gate.open()
        assert process.wait() != 0
    chaos.settle()
    assert keys(ministack, bucket) == []


# ── what is said of it ───────────────────────────────────────────────────────────────────────────────────────


def findings(abilities: dict[str, Ability], **more: Any) -> Findings:
    return Findings(url="s3://b/run", abilities=abilities, **{"endpoint": "s3", **more})


@given(lacking=st.sets(st.sampled_from(NEEDED)))
def test_any_lack_is_no_fitness(lacking: set[str]) -> None:
    """A store is fit if it has everything that is needed; without the condition alone one writer may use it."""
    verdict = judge(findings({name: Ability(name not in lacking) for name in NEEDED}))
    assert verdict.fit == (not lacking)
    assert verdict.words.startswith("only with single_writer=True") == (lacking == {EXCLUSIVE})
