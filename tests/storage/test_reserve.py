"""The reserve of a local run directory: only ledger entries use it, and nothing else sees it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.errors import ConfigError, StoreError
from ckpt_tasks.format.keys import ledger_name, live_list_name
from ckpt_tasks.storage.local import LocalStore
from tests.storage.conformance import files
from tests.support.small_disk import fill_with_bytes, fill_with_files, small_disk


def reserve(root: Path) -> list[Path]:
    return sorted((root / ".ckpt-reserve").iterdir())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", size="16m", nr_inodes=400) as at:
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


def test_without_inodes_ledger_entries_are_written(disk: Path) -> None:
    """P37: each file of the reserve frees an inode as well; entries go on where no file can be made."""
    store = made(disk / "run")
    fill_with_files(disk)
    with pytest.raises(StoreError):
        store.put("a/data", [b"x"])
    for n in range(1, 8):
        store.put_if_absent(ledger_name(n), b"e")
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


def test_a_link_in_its_place_is_not_followed(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P42: where `.ckpt-reserve` is a link to another place, nothing is made or deleted there."""
    store = LocalStore(disk / "run")
    store.put_if_absent(ledger_name(0), b"0")
    (disk / "other").mkdir()
    (disk / "other/00").write_text("precious")
    (disk / "run/.ckpt-reserve").symlink_to(disk / "other")
    store.keep_room()
    assert "symbolic link" in caplog.text
    fill_with_bytes(disk)
    with pytest.raises(StoreError, match="disk is full"):
        store.put_if_absent(ledger_name(1), b"e" * 5000)
    assert files(disk / "other") == ["00"]
    assert (disk / "other/00").read_text() == "precious"
