"""The local directory as a store: the contract of every store, and what only a file system can get wrong."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_tasks.errors import (
    CommitUncertainError,
    ConfigError,
    IntegrityError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
)
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store
from tests.storage.calls import FailingCalls, ShortWrites, WatchedCalls
from tests.storage.conformance import StoreConformance, pattern


class TestLocalStore(StoreConformance):
    """A local directory keeps the contract of every store."""

    many = 200  # a directory has no pages, and each file costs an fsync

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "run")

    def again(self, store: Store) -> Store:
        return LocalStore(store.url)

    def stored(self, store: Store, name: str) -> bytes | None:
        path = Path(store.url, name)
        return path.read_bytes() if path.exists() else None


class TestOnMemory(TestLocalStore):
    """P41: a tmpfs, which refuses O_DIRECT, keeps the contract as well."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("there is no /dev/shm")
        root = Path("/dev/shm") / f"ckpt-tasks-{os.getpid()}-{tmp_path.name}"
        yield LocalStore(root)
        subprocess.run(["rm", "-rf", root], check=True)


def files(root: Path) -> list[str]:
    """List everything below a directory, hidden and temporary names too."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("offset", [0, 1, 8, 512, 4095])
@pytest.mark.parametrize("size_bytes", [(2 << 20) - 1, 2 << 20, (2 << 20) + 4097, (33 << 20) + 5])
def test_a_buffer_at_any_address_is_written_whole(tmp_path: Path, offset: int, size_bytes: int) -> None:
    """P41: aligned and unaligned buffers, with and without a tail, through O_DIRECT or not, give the same bytes."""
    memory = np.zeros(size_bytes + 2 * 4096, np.uint8)
    start = -memory.ctypes.data % 4096 + offset
    memory[start : start + size_bytes] = np.frombuffer(pattern(size_bytes), np.uint8)
    calls = WatchedCalls()
    store = LocalStore(tmp_path / "run", calls=calls)
    store.put("a/b", [memory[start : start + size_bytes].data, b"tail"])
    assert (tmp_path / "run/a/b").read_bytes() == pattern(size_bytes) + b"tail"
    into = np.zeros(size_bytes + 4096, np.uint8)
    view = into.data[-into.ctypes.data % 4096 :][:size_bytes]
    store.read("a/b", 0, view)
    assert view == pattern(size_bytes)


@pytest.mark.parametrize("begin", [0, 1, 4096, 5000, 4 << 20])
def test_a_large_range_is_read_whole_around_the_cache(tmp_path: Path, begin: int) -> None:
    """P41: a large read, from any byte, into a buffer aligned as the file is, with the cache cold or warm, is exact."""
    data = pattern((8 << 20) + 777)
    store = LocalStore(tmp_path / "run")
    store.put("a/b", [data])
    memory = np.zeros(len(data) + 8192, np.uint8)
    at = -memory.ctypes.data % 4096 + begin % 4096
    for end in (len(data), len(data) - 777, begin + (2 << 20)):
        for warm in (False, True):
            with (tmp_path / "run/a/b").open("rb") as file:
                if not warm:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    file.read(1 << 20)
            memory[:] = 0
            store.read("a/b", begin, memory.data[at : at + end - begin])
            assert memory[at : at + end - begin].tobytes() == data[begin:end]
            assert not memory[:at].any()
            assert not memory[at + end - begin :].any()


def test_a_file_cut_short_is_an_error_also_around_the_cache(tmp_path: Path) -> None:
    """P48, P56: a large read of a file that was cut raises, wherever it was cut."""
    store = LocalStore(tmp_path / "run")
    store.put("a/b", [pattern(4 << 20)])
    memory = np.zeros((4 << 20) + 4096, np.uint8)
    view = memory.data[-memory.ctypes.data % 4096 :][: 4 << 20]
    for size_bytes in ((4 << 20) - 1, 3 << 20, (2 << 20) + 100, 1, 0):
        os.truncate(tmp_path / "run/a/b", size_bytes)
        with pytest.raises(IntegrityError, match="ends at byte"):
            store.read("a/b", 0, view)


@pytest.mark.parametrize("most", [1000, 4096, (1 << 20) + 512, 5 << 20])
def test_short_writes_are_gone_on_with(tmp_path: Path, most: int) -> None:
    """P28: a write that takes only a part, aligned or not, is gone on with until all is written."""
    memory = np.frombuffer(pattern(3 << 20) + bytes(4096), np.uint8).copy()
    start = -memory.ctypes.data % 4096
    body = memory[start : start + (3 << 20)].data
    calls = ShortWrites(most)
    LocalStore(tmp_path / "run", calls=calls).put("a/b", [body])
    assert (tmp_path / "run/a/b").read_bytes() == bytes(body)
    assert len([name for name, _ in calls.log if name == "pwrite"]) > (0 if most > 3 << 20 else 2)


class NoDirect(WatchedCalls):
    """A file system that takes O_DIRECT at open and refuses it at the second write."""

    def pwrite(self, fd: int, piece: Any, at: int) -> int:
        import fcntl

        if at and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().pwrite(fd, piece[: 1 << 20], at)


def test_a_file_system_that_refuses_direct_writes_late_gets_ordinary_ones(tmp_path: Path) -> None:
    """P41: EINVAL at a write, not at open, loses and repeats no byte."""
    memory = np.frombuffer(pattern(5 << 20), np.uint8).copy()
    start = -memory.ctypes.data % 4096
    body = memory[start : start + (4 << 20)].data
    LocalStore(tmp_path / "run", calls=NoDirect()).put("a/b", [body])
    assert (tmp_path / "run/a/b").read_bytes() == bytes(body)


# ── durability ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_put_is_durable_names_included(tmp_path: Path) -> None:
    """P35: a file's fsync comes after its last write, and each new directory's name is fsynced on the way."""
    calls = WatchedCalls()
    LocalStore(tmp_path / "run", calls=calls).put("a/b/c", [b"x", b"y"])
    root = str(tmp_path / "run")
    assert [(name, path) for name, path in calls.log if name != "open"] == [
        ("mkdir", root),
        ("fsync", str(tmp_path)),
        ("mkdir", f"{root}/a"),
        ("fsync", root),
        ("mkdir", f"{root}/a/b"),
        ("fsync", f"{root}/a"),
        ("pwrite", f"{root}/a/b/c"),
        ("pwrite", f"{root}/a/b/c"),
        ("fsync", f"{root}/a/b/c"),
        ("fsync", f"{root}/a/b"),
    ]


def test_a_commit_is_durable_before_it_can_be_seen(tmp_path: Path) -> None:
    """P35, P46: put-if-absent fsyncs its bytes before the link that shows them, and the link's directory after it."""
    store = LocalStore(tmp_path / "run")
    store.put("ledger/0", [b""])
    calls = WatchedCalls()
    LocalStore(tmp_path / "run", calls=calls).put_if_absent("ledger/1", b"x")
    ledger = str(tmp_path / "run/ledger")
    done = [(name, path) for name, path in calls.log if name != "open"]
    kinds = [name for name, _ in done]
    assert kinds[-5:] == ["pwrite", "fsync", "link", "fsync", "unlink"]
    written, synced, linked, confirmed, cleaned = (path for _, path in done[-5:])
    assert written == synced == cleaned
    assert (linked, confirmed) == (f"{ledger}/1", ledger)
    assert Path(written).parent == Path(ledger)


def test_directories_that_another_process_left_are_made_durable_too(tmp_path: Path) -> None:
    """P35: a process may die between mkdir and fsync; the next one fsyncs the names of directories that it finds."""
    (tmp_path / "run/ledger").mkdir(parents=True)
    calls = WatchedCalls()
    store = LocalStore(tmp_path / "run", calls=calls)
    store.put_if_absent("ledger/1", b"x")
    synced = [path for name, path in calls.log if name == "fsync"]
    assert str(tmp_path / "run") in synced
    assert str(tmp_path) in synced
    calls.log.clear()
    store.put_if_absent("ledger/2", b"x")
    assert str(tmp_path / "run") not in [path for _, path in calls.log]  # … and once is enough


def test_a_directory_that_was_deleted_meanwhile_is_made_again(tmp_path: Path) -> None:
    """P64: pruning removes empty directories; a later put into one makes it, and its name durable, again."""
    calls = WatchedCalls()
    store = LocalStore(tmp_path / "run", calls=calls)
    store.put("a/b/c", [b"x"])
    store.delete("a/b/c")
    assert files(tmp_path / "run") == []
    calls.log.clear()
    store.put("a/b/c", [b"x"])
    assert [path for name, path in calls.log if name == "mkdir"] == [f"{tmp_path}/run/a", f"{tmp_path}/run/a/b"]


def test_a_failed_fsync_of_a_file_gives_it_up(tmp_path: Path) -> None:
    """P35: the kernel drops the pages of a failed fsync: the file is removed and never fsynced again."""
    for verb in ("put", "put_if_absent"):
        LocalStore(tmp_path / "run").put(f"{verb}/before", [b""])
        calls = FailingCalls(3, "refused", only="fsync")  # after those of two directories
        store = LocalStore(tmp_path / "run", calls=calls)
        with pytest.raises(StoreError) as caught:
            store.put(f"{verb}/x", [b"1"]) if verb == "put" else store.put_if_absent(f"{verb}/x", b"1")
        assert caught.value.errno == errno.EIO
        assert f"/{verb}/" in calls.where
        assert files(tmp_path / "run" / verb) == ["before"]
        assert len([1 for name, _ in calls.log if name == "fsync"]) == 2


def test_a_commit_whose_name_is_not_confirmed_is_uncertain(tmp_path: Path) -> None:
    """P35: where the directory's fsync fails after the link, the entry can be read, and is not called durable."""
    LocalStore(tmp_path / "run").put("ledger/0", [b""])
    calls = FailingCalls(4, "refused", only="fsync")  # after those of two directories and of the file
    store = LocalStore(tmp_path / "run", calls=calls)
    with pytest.raises(CommitUncertainError) as caught:
        store.put_if_absent("ledger/1", b"x")
    assert calls.where.endswith("/ledger")
    assert caught.value.key == "ledger/1"
    assert files(tmp_path / "run/ledger") == ["0", "1"]


@pytest.mark.parametrize("verb", ["put", "put_if_absent", "replace"])
@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "link", "replace", "mkdir"])
def test_a_refused_call_leaves_nothing_behind(tmp_path: Path, verb: str, call: str) -> None:
    """P28, P37: whichever call is refused, the error is ours, the object is absent, and no temporary name stays."""
    for n in count(1):
        root = tmp_path / f"run{n}"
        calls = FailingCalls(n, "refused", only=call)
        store = LocalStore(root, calls=calls)
        body: Any = [b"x"] if verb == "put" else b"x"
        try:
            getattr(store, verb)("a/b", body)
        except CommitUncertainError:
            whole = True
        except StoreError:
            # A put whose last fsync failed leaves the object under its own name: only the name may not last.
            whole = verb == "put" and ("fsync", f"{root}/a/b") in calls.log
        else:
            whole = True
        assert [name for name in (files(root) if root.exists() else []) if name != "a"] == ["a/b"] * whole
        if not calls.reached:
            assert whole
            break


def test_what_a_killed_process_left_is_swept_when_it_is_old(tmp_path: Path) -> None:
    """P67: temporary names of ours that are old go at the next start; young ones and those of others stay."""
    LocalStore(tmp_path / "run").put_if_absent("ledger/1", b"x")
    ledger = tmp_path / "run/ledger"
    for name in (".tmp-0011223344556677", ".tmp-8899aabbccddeeff", ".tmp-other", ".nfs0001"):
        (ledger / name).write_text("left")
    for name in (".tmp-0011223344556677", ".tmp-other", ".nfs0001", "99"):
        (ledger / name).touch()
        os.utime(ledger / name, (0, 0))
    LocalStore(tmp_path / "run").put_if_absent("ledger/2", b"x")
    assert files(ledger) == [".nfs0001", ".tmp-8899aabbccddeeff", ".tmp-other", "1", "2", "99"]


def test_a_link_whose_answer_was_lost_is_a_link(tmp_path: Path) -> None:
    """P32: over NFS a link can be made and reported as failed; two names on the file say that it was made."""
    calls = FailingCalls(1, "landed", only="link")
    LocalStore(tmp_path / "run", calls=calls).put_if_absent("ledger/1", b"x")
    assert calls.reached
    assert files(tmp_path / "run/ledger") == ["1"]


def test_a_link_that_was_refused_is_an_error(tmp_path: Path) -> None:
    """P33: a link that was not made is not called one."""
    with pytest.raises(StoreError):
        LocalStore(tmp_path / "run", calls=FailingCalls(1, "refused", only="link")).put_if_absent("ledger/1", b"x")
    assert files(tmp_path / "run/ledger") == []


RACE = """
import sys, time
from ckpt_tasks.errors import ObjectExistsError
from ckpt_tasks.storage.local import LocalStore

store, who, rounds = LocalStore(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for n in range(rounds):
    while len(store.names(f"start/")) <= n:
        time.sleep(0.0002)
    try:
        store.put_if_absent(f"ledger/{n}", who.encode())
        print(n, flush=True)
    except ObjectExistsError:
        pass
"""


def test_of_racing_processes_exactly_one_wins(tmp_path: Path) -> None:
    """P33: of 16 processes that put one name at once, exactly one is told that it won, and its bytes are there."""
    writers, rounds = 16, 30
    store = LocalStore(tmp_path / "run")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, store.url, str(who), str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for who in range(writers)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdin is not None
        assert racer.stdout.readline() == "ready\n"
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for n in range(rounds):
        store.put(f"start/{n:05d}", [b""])
    won: dict[int, list[str]] = {}
    for who, racer in enumerate(racers):
        out, _ = racer.communicate(timeout=120)
        assert racer.returncode == 0
        for line in out.split():
            won.setdefault(int(line), []).append(str(who))
    assert sorted(won) == list(range(rounds))
    for n, winners in won.items():
        assert [Path(store.url, f"ledger/{n}").read_text()] == winners


# ── the file system around it ────────────────────────────────────────────────────────────────────────────────


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


def test_a_symbolic_link_is_not_read(tmp_path: Path) -> None:
    """P42: a link in place of a file is an error, and does not show what it points to."""
    (tmp_path / "secret").write_text("secret")
    store = LocalStore(tmp_path / "run")
    store.put("a/b", [b"x"])
    (tmp_path / "run/a/link").symlink_to(tmp_path / "secret")
    for read in (lambda: store.get("a/link", 100), lambda: store.size("a/link")):
        with pytest.raises(IntegrityError, match="link"):
            read()
    assert store.names("") == ["a/b"]


def test_a_symbolic_link_is_not_followed_when_deleting(tmp_path: Path) -> None:
    """P42: where a directory was replaced by a link to another place, nothing there is deleted, whatever the cwd."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "b").mkdir(parents=True)
    (elsewhere / "b/c").write_text("precious")
    store = LocalStore(tmp_path / "run")
    store.put("x", [b""])
    (tmp_path / "run/a").symlink_to(elsewhere)
    with pytest.raises(StoreError, match="symbolic link"):
        store.delete("a/b/c")
    assert (elsewhere / "b/c").read_text() == "precious"
    assert store.names("") == ["x"]


def test_deleting_a_link_removes_the_link_alone(tmp_path: Path) -> None:
    """P42: an object that was replaced by a link loses the link, and what it points to stays."""
    (tmp_path / "precious").write_text("precious")
    store = LocalStore(tmp_path / "run")
    store.put("a/b", [b"x"])
    (tmp_path / "run/a/link").symlink_to(tmp_path / "precious")
    store.delete("a/link")
    assert (tmp_path / "precious").read_text() == "precious"
    assert files(tmp_path / "run") == ["a", "a/b"]


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


@pytest.mark.parametrize("root", ["", "s3://bucket/run", "a\0b", "memory://x"])
def test_what_is_no_local_directory_is_refused(root: str) -> None:
    """A URL or an empty name is a ConfigError, not a directory of that name."""
    with pytest.raises(ConfigError):
        LocalStore(root)


def test_a_file_in_the_way_is_said_to_be_one(tmp_path: Path) -> None:
    """A file where the run directory, or one in it, should be is an error that says so."""
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file/run"):
        with pytest.raises(StoreError, match=r"directory|exists"):
            LocalStore(root).put("a/b", [b"x"])
    assert LocalStore(tmp_path / "file/run").names("") == []


def test_making_a_store_touches_nothing(tmp_path: Path) -> None:
    """Looking at a run directory that does not exist does not make it."""
    store = LocalStore(tmp_path / "run")
    assert store.names("") == []
    with pytest.raises(ObjectNotFoundError):
        store.get("format.json", 10)
    store.delete("a/b")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_says_so(tmp_path: Path) -> None:
    """An unwritable directory is a StoreError with what to do."""
    (tmp_path / "run").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="not writable"):
        LocalStore(tmp_path / "run").put("a/b", [b"x"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 4 MiB and 40 files."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    at = tmp_path / "small"
    at.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=40", "tmpfs", at], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield at
    subprocess.run(["umount", "-l", at], check=True)


def test_a_full_disk_is_an_error_that_says_so_and_leaves_nothing(small_disk: Path) -> None:
    """P37: ENOSPC half-way is a StoreError with what to do; the object is gone and its space is free."""
    store = LocalStore(small_disk / "run")
    store.put("a/old", [pattern(1 << 20)])
    for _ in range(3):
        with pytest.raises(StoreError, match="disk is full") as caught:
            store.put("a/new", [pattern(3 << 20), pattern(1 << 20)])
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(StoreError):
            store.put_if_absent("a/commit", pattern(4 << 20))
        assert files(small_disk / "run") == ["a", "a/old"]
    store.put("a/fits", [pattern(2 << 20)])
    assert (small_disk / "run/a/old").read_bytes() == pattern(1 << 20)


def test_a_disk_without_inodes_is_an_error_that_leaves_nothing(small_disk: Path) -> None:
    """P37: when no more files can be made the store says so, names nothing new, and goes on when there is room."""
    store = LocalStore(small_disk / "run")

    def fill() -> None:
        for n in range(100):
            store.put(f"a/{n:03d}", [b"x"])

    with pytest.raises(StoreError, match="disk is full"):
        fill()
    made = store.names("a/")
    assert made == [f"a/{n:03d}" for n in range(len(made))]
    assert files(small_disk / "run/a") == [name.removeprefix("a/") for name in made]
    with pytest.raises(StoreError):
        store.put_if_absent("b/commit", b"x")
    for name in made[:5]:
        store.delete(name)
    store.put_if_absent("b/commit", b"x")
    assert not [name for name in files(small_disk / "run") if ".tmp" in name]


def test_two_objects_of_one_name_are_told_apart_by_error(tmp_path: Path) -> None:
    """P31: writing a taken name is ObjectExistsError, and the first object's file is not removed on the way out."""
    store = LocalStore(tmp_path / "run")
    store.put("a/b", [b"first"])
    with pytest.raises(ObjectExistsError):
        store.put("a/b", [pattern(3 << 20)])
    assert (tmp_path / "run/a/b").read_bytes() == b"first"
