"""The reserve of a local run directory: only ledger entries use it, and nothing else sees it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.errors import ConfigError, StoreError
from ckpt_tasks.format.keys import ledger_name, live_list_name
from ckpt_tasks.storage.local import LocalStore
from tests.storage.conformance import files
from tests.support.calls import WatchedCalls
from tests.support.small_disk import fill_with_bytes, fill_with_files, small_disk

ALL = [".ckpt-reserve", *(f".ckpt-reserve/{n:02d}" for n in range(16))]


def reserve(root: Path) -> list[Path]:
    return sorted((root / ".ckpt-reserve").iterdir())


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    with small_disk(tmp_path / "small", request.param, size="16m") as at:
        yield at


def made(root: Path, calls: Any = os) -> LocalStore:
    """Return a store with a first ledger entry and a reserve."""
    store = LocalStore(root, calls=calls)
    store.put_if_absent(ledger_name(0), b"0")
    store.put_if_absent(live_list_name("0" * 32), b"0")
    store.keep_room()
    return store


def test_the_reserve_is_random_bytes_of_its_size_and_nothing_lists_it(tmp_path: Path) -> None:
    """P37: 16 files of 64 KiB that are all different; no name, listing or read of the store leads to them."""
    store = made(tmp_path / "run")
    bodies = {path.read_bytes() for path in reserve(tmp_path / "run")}
    assert [len(body) for body in bodies] == [64 << 10] * 16
    assert store.names("") == sorted([ledger_name(0), live_list_name("0" * 32)])
    for ask in (store.names, store.delete, store.size):
        with pytest.raises(ConfigError):
            ask(".ckpt-reserve/00")
    assert {path.stat().st_mode & 0o777 for path in reserve(tmp_path / "run")} == {0o600}


def test_on_a_full_disk_ledger_entries_are_written_and_nothing_else_is(disk: Path) -> None:
    """P37: an entry and a segment of the ledger find room in the reserve; data and other objects find none."""
    store = made(disk / "run")
    fill_with_bytes(disk)
    with pytest.raises(StoreError, match="disk is full"):
        store.put("a/data", [b"x" * 5000])
    with pytest.raises(StoreError, match="disk is full"):
        store.put_if_absent("probe/x", b"x" * 5000)
    with pytest.raises(StoreError, match="disk is full"):
        store.replace("heartbeat/000001.json", b"x" * 5000)
    assert len(reserve(disk / "run")) == 16
    store.put_if_absent(ledger_name(1), b"e" * 5000)
    store.put_if_absent(live_list_name("1" * 32), b"s" * 5000)
    assert (store.get(ledger_name(1), 9000), len(reserve(disk / "run"))) == (b"e" * 5000, 15)


def test_a_reserve_that_is_used_up_is_the_error_of_a_full_disk(disk: Path) -> None:
    """P37: where others take the room each time, 16 entries are written; then the disk is full, and says so."""
    store = made(disk / "run")
    for n in range(1, 17):
        fill_with_bytes(disk)
        store.put_if_absent(ledger_name(n), b"e" * 5000)
    assert reserve(disk / "run") == []
    fill_with_bytes(disk)
    with pytest.raises(StoreError, match="disk is full") as caught:
        store.put_if_absent(ledger_name(17), b"e" * 5000)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.denied


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_without_inodes_ledger_entries_are_written(tmp_path: Path, kind: str) -> None:
    """P37: each file of the reserve frees an inode as well; entries go on where no file can be made."""
    with small_disk(tmp_path / "small", kind, size="16m", nr_inodes=100) as at:
        store = made(at / "run")
        fill_with_files(at)
        with pytest.raises(StoreError):
            store.put("a/data", [b"x"])
        for n in range(1, 8):
            store.put_if_absent(ledger_name(n), b"e")
        assert 0 < len(reserve(at / "run")) < 16


class Quota(WatchedCalls):
    """Take no write that brings the files of a directory above a limit; `os` does that for other users than root."""

    def __init__(self, root: Path):
        super().__init__()
        self.root, self.limit_bytes = root, 1 << 40

    def pwrite(self, fd: int, piece: Any, at: int) -> int:
        used_bytes = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        if used_bytes + len(piece) > self.limit_bytes:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return super().pwrite(fd, piece, at)


def test_a_quota_that_is_used_up_is_a_full_disk(tmp_path: Path) -> None:
    """P37: EDQUOT is met as ENOSPC is."""
    calls = Quota(tmp_path / "run")
    store = made(tmp_path / "run", calls)
    calls.limit_bytes = (1 << 20) + 100
    with pytest.raises(StoreError, match="quota"):
        store.put("a/data", [b"x" * 5000])
    store.put_if_absent(ledger_name(1), b"e" * 5000)
    assert len(reserve(tmp_path / "run")) == 15


def test_any_other_error_leaves_the_reserve_alone(tmp_path: Path) -> None:
    """An entry that exists, or a disk that does not answer, costs no file of the reserve."""
    store = made(tmp_path / "run")
    with pytest.raises(StoreError):
        store.put_if_absent(ledger_name(0), b"other")
    assert files(tmp_path / "run")[: len(ALL)] == ALL


def test_two_writers_use_the_reserve_at_once(disk: Path) -> None:
    """P37: two writers on a full disk write every entry; no file is deleted twice, and no error is seen."""
    made(disk / "run")
    fill_with_bytes(disk)
    errors: list[Exception] = []

    def write(first: int) -> None:
        store = LocalStore(disk / "run")
        for n in range(first, 100, 2):
            try:
                store.put_if_absent(ledger_name(n), b"e" * 5000)
            except StoreError as error:
                errors.append(error)

    threads = [threading.Thread(target=write, args=(first,)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(LocalStore(disk / "run").names("ledger/")) == 100
    assert 0 < len(reserve(disk / "run")) < 16


def test_it_is_filled_again_and_what_a_killed_process_left_of_it_is_made_whole(tmp_path: Path) -> None:
    """P30: files that are missing or short are made, and whole ones are left as they are."""
    store = made(tmp_path / "run")
    whole, short, *_ = reserve(tmp_path / "run")
    body = whole.read_bytes()
    os.truncate(short, 100)
    reserve(tmp_path / "run")[5].unlink()
    store.keep_room()
    assert [path.stat().st_size for path in reserve(tmp_path / "run")] == [64 << 10] * 16
    assert whole.read_bytes() == body


def test_where_there_is_no_room_for_it_one_warning_says_so(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P37: a full disk without a reserve fails no run: one warning; what could not be made leaves nothing."""
    store = LocalStore(disk / "run")
    store.put_if_absent(ledger_name(0), b"0")
    fill_with_bytes(disk)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        store.keep_room()
        store.keep_room()
    assert [record.getMessage().count("no room could be reserved") for record in caplog.records] == [1]
    with pytest.raises(StoreError, match="disk is full"):
        store.put_if_absent(ledger_name(1), b"e" * 5000)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P42: where `.ckpt-reserve` is a link to another place, nothing is made or deleted there."""
    calls = Quota(tmp_path / "run")
    store = LocalStore(tmp_path / "run", calls=calls)
    store.put_if_absent(ledger_name(0), b"0")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/00").write_text("precious")
    (tmp_path / "run/.ckpt-reserve").symlink_to(tmp_path / "other")
    store.keep_room()
    assert "symbolic link" in caplog.text
    calls.limit_bytes = 0
    with pytest.raises(StoreError, match="quota"):
        store.put_if_absent(ledger_name(1), b"e")
    assert files(tmp_path / "other") == ["00"]
    assert (tmp_path / "other/00").read_text() == "precious"
