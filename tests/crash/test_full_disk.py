"""A run on a disk that is really full: what frees room, takes over and restores goes on; a save says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_tasks.errors import StoreError
from ckpt_tasks.testing import die
from tests.support.cli_runs import ckpt as command
from tests.support.runs import (
    EXPECTED,
    UNTOUCHED,
    faults_of,
    fingerprint,
    head_of,
    on_disk,
    opened,
    restored,
    run_of,
    state_of,
    train,
)
from tests.support.small_disk import fill_with_bytes, fill_with_files, small_disk
from tests.support.sweeps import quick_first


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    with small_disk(tmp_path / "small", request.param, size="16m") as at:
        yield at


def live(root: Path) -> list[int]:
    return sorted(checkpoint.step for checkpoint in head_of(root).live)


def reserved(root: Path) -> int:
    return sum(name.startswith(".ckpt-reserve/") for name in on_disk(root))


@pytest.mark.parametrize("fill", quick_first([fill_with_bytes, fill_with_files]))
def test_a_full_disk_is_pruned(disk: Path, fill: Callable[[Path], None]) -> None:
    """P37: without a byte, or a file, left, `ckpt prune` deletes, and the reserve is filled again."""
    root = disk / "run"
    train(root, 1, 2, 3, max_num_checkpoints=None)
    fill(disk)
    answer = command("prune", root, "--max-num-checkpoints", "1")
    assert answer.status == 0, answer
    assert live(root) == [3]
    assert not [name for name in on_disk(root) if "checkpoint_000000000001" in name]
    assert faults_of(root) == {}
    assert reserved(root) == 16


def test_a_full_disk_is_taken_over_and_restored_and_a_save_says_why_it_fails(disk: Path) -> None:
    """P37: after a kill the next process takes the run, restores exactly, and releases it; its save names the disk."""
    root = disk / "run"
    before = opened(root)
    before.restore(state_of(UNTOUCHED))
    before.save(1, state_of(1))
    die(before)
    fill_with_bytes(disk)
    ckpt = opened(root, take_over=True)
    target = state_of(UNTOUCHED)
    assert ckpt.restore(target) == 1
    assert fingerprint(target) == EXPECTED[1]
    fill_with_bytes(disk)  # what the take-over left of the reserve's file as well
    with pytest.raises(StoreError, match="disk is full"):
        ckpt.save(2, state_of(2))
    assert live(root) == [1]
    ckpt.close()
    owner = head_of(root).owner
    assert owner is not None
    assert owner.released
    for ballast in disk.glob("ballast-*"):
        ballast.unlink()
    step, after = restored(root)
    assert step == 1
    after.save(2, state_of(2))
    after.close()
    assert (live(root), reserved(root)) == ([1, 2], 16)


def test_a_full_disk_takes_a_lease(disk: Path) -> None:
    """P37: a reader leases a checkpoint of a run on a full disk, and ends the lease."""
    root = disk / "run"
    train(root, 1)
    fill_with_bytes(disk)
    run = run_of(root)
    with run.lease(run.find(1), "a reader"):
        assert [lease.holder for lease in head_of(root).leases] == ["a reader"]
    assert head_of(root).leases == ()


def test_a_run_of_an_earlier_version_gets_a_reserve_from_its_next_owner(tmp_path: Path) -> None:
    """A run without a reserve is gone on with as ever, and has one from then on."""
    root = tmp_path / "run"
    train(root, 1)
    for name in on_disk(root):
        if name.startswith(".ckpt-reserve/"):
            (root / name).unlink()
    (root / ".ckpt-reserve").rmdir()
    train(root, 2)
    assert (live(root), reserved(root)) == ([1, 2], 16)
