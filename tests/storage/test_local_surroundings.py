"""The local directory as a store: what else lies there, who may read it, and what happens when the disk is full."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_tasks.errors import ConfigError, IntegrityError, StoreError
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.locations import Location
from tests.storage.conformance import files, pattern
from tests.support.small_disk import small_disk


@pytest.mark.parametrize(("group", "directory", "file"), [(False, 0o700, 0o600), (True, 0o770, 0o660)])
def test_what_is_written_is_the_users_own(tmp_path: Path, group: bool, directory: int, file: int) -> None:
    """Directories are 0700 and files 0600, or 0770 and 0660 with group_access, whatever the umask says."""
    before = os.umask(0o027)
    try:
        store = LocalStore(tmp_path / "run", group_access=group)
        store.put("a/b/c", [b"x"])
        store.put_if_absent("a/d", b"x")
        store.replace("a/e", b"x")
    finally:
        os.umask(before)
    modes = {
        path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run", *(tmp_path / "run").rglob("*"))
    }
    assert modes == {True: directory, False: file}
    assert files(tmp_path / "run") == ["a", "a/b", "a/b/c", "a/d", "a/e"]


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    """P42: a link in place of a file or of a directory is neither read through nor deleted through."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "c").write_text("precious")
    store = LocalStore(tmp_path / "run")
    store.put("a/b", [b"x"])
    (tmp_path / "run/a/link").symlink_to(elsewhere / "c")
    (tmp_path / "run/d").symlink_to(elsewhere)
    for read in (lambda: store.get("a/link", 100), lambda: store.size("a/link")):
        with pytest.raises(IntegrityError, match="link"):
            read()
    with pytest.raises(StoreError, match="symbolic link"):
        store.delete("d/c")
    assert store.names("") == ["a/b"]
    store.delete("a/link")
    assert (elsewhere / "c").read_text() == "precious"
    assert files(tmp_path / "run") == ["a", "a/b", "d"]


def test_a_run_directory_behind_a_link_works(tmp_path: Path) -> None:
    """The run directory itself may be reached through a link, as homes and scratch disks often are."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    store = LocalStore(tmp_path / "home/run")
    store.put("a/b", [b"x"])
    store.delete("a/b")
    assert files(tmp_path / "disk") == ["run"]


@pytest.mark.timeout(20)
def test_a_pipe_does_not_hang_its_reader(tmp_path: Path) -> None:
    """P42, P43: a FIFO, a directory or a socket in place of a file is an error at once."""
    store = LocalStore(tmp_path / "run")
    store.put("a/b/c", [b"x"])
    os.mkfifo(tmp_path / "run/a/pipe")
    for name in ("a/pipe", "a/b"):
        for read in (lambda name=name: store.get(name, 1), lambda name=name: store.size(name)):
            with pytest.raises(IntegrityError, match="not a regular file"):
                read()
    assert store.names("") == ["a/b/c"]


def test_foreign_names_are_neither_listed_nor_deleted(tmp_path: Path) -> None:
    """P51: what other programs leave in the directory is ignored, and keeps its directory alive."""
    store = LocalStore(tmp_path / "run")
    store.put("a/b", [b"x"])
    foreign = [".DS_Store", "a/.nfs0001", "a/.tmp-0011", "notes (1).txt", "a/ü", "a/x y"]
    for name in foreign:
        (tmp_path / "run" / name).write_text("foreign")
    (tmp_path / "run/1/2/3/4/5").mkdir(parents=True)
    (tmp_path / "run/1/2/3/4/5/deep").write_text("foreign")
    assert store.names("") == ["a/b"]
    store.delete("a/b")
    assert {*foreign, "1/2/3/4/5/deep"} <= {*files(tmp_path / "run")}


@pytest.mark.parametrize("root", ["", "s3://bucket/run", "a\0b", "~nobody-of-this-name/run"])
def test_what_is_no_local_directory_is_refused(root: str) -> None:
    """A URL or an empty name is a ConfigError, not a directory of that name."""
    with pytest.raises(ConfigError):
        LocalStore(root)


def test_a_file_in_the_way_is_said_to_be_one(tmp_path: Path) -> None:
    """A file where the run directory, or one above it, should be is an error at once, with its path; so is /proc."""
    (file := tmp_path / "file").write_text("")
    for root in (file, file / "run", f"file://{file}/a/b"):
        with pytest.raises(ConfigError, match=f"{file} is a file, and a run is a directory"):
            Location(str(root)).open()
    for root in (file / "run", Path("/proc/run"), Path("/proc/a/b")):  # the file can come after the store was opened
        with pytest.raises((ConfigError, StoreError), match=rf"{'|'.join(map(str, [*root.parents][:2]))}"):
            LocalStore(root).put_if_absent("format.json", b"x")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", size="4m", nr_inodes=40) as disk:
        yield disk


def test_a_full_disk_is_an_error_that_says_so_and_leaves_nothing(small: Path) -> None:
    """P37: ENOSPC half-way is a StoreError with what to do; the object is gone and its space is free."""
    store = LocalStore(small / "run")
    store.put("a/old", [pattern(1 << 20)])
    for _ in range(3):
        with pytest.raises(StoreError, match="disk is full") as caught:
            store.put("a/new", [pattern(3 << 20), pattern(1 << 20)])
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(StoreError):
            store.put_if_absent("a/commit", pattern(4 << 20))
        assert files(small / "run") == ["a", "a/old"]
    store.put("a/fits", [pattern(2 << 20)])
    assert (small / "run/a/old").read_bytes() == pattern(1 << 20)
