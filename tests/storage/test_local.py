"""The local directory as a store: the contract of every store, and what only a file system can get wrong."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_tasks.errors import CommitUncertainError, IntegrityError, ObjectExistsError, StoreError
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store
from tests.storage.conformance import StoreConformance, files, pattern
from tests.support.calls import FailingCalls, ShortWrites, WatchedCalls
from tests.support.sweeps import quick_first


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


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("size_bytes", "offset"), [((2 << 20) + 4097, 0), ((2 << 20) - 1, 1), (2 << 20, 512), ((33 << 20) + 5, 1)]
)
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


@pytest.mark.parametrize("begin", [0, 5000, 4 << 20])
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


@pytest.mark.parametrize("most", [1000, (1 << 20) + 512])
def test_short_writes_are_gone_on_with(tmp_path: Path, most: int) -> None:
    """P28: a write that takes only a part, aligned or not, is gone on with until all is written."""
    memory = np.frombuffer(pattern(3 << 20) + bytes(4096), np.uint8).copy()
    start = -memory.ctypes.data % 4096
    body = memory[start : start + (3 << 20)].data
    calls = ShortWrites(most)
    LocalStore(tmp_path / "run", calls=calls).put("a/b", [body])
    assert (tmp_path / "run/a/b").read_bytes() == bytes(body)
    assert len([name for name, _ in calls.log if name == "pwrite"]) > 2


class Direct(WatchedCalls):
    """Write down how many bytes each write took around the page cache, and how many through it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[bool, list[int]] = {True: [], False: []}

    def pwrite(self, fd: int, piece: Any, at: int) -> int:
        count = super().pwrite(fd, piece, at)
        self.written[is_direct(fd)].append(count)
        return count


class NoDirect(Direct):
    """A file system that takes O_DIRECT at open and refuses it at the second write."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[int] = []

    def pwrite(self, fd: int, piece: Any, at: int) -> int:
        if at and is_direct(fd):
            self.refused.append(at)
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().pwrite(fd, piece[: 1 << 20], at)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Return a directory on a file system that takes O_DIRECT."""
    with mmap.mmap(-1, 1 << 20) as page:
        try:
            fd = os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
            with open(fd, "wb", buffering=0) as file:
                file.write(page)
        except (AttributeError, OSError) as error:
            pytest.skip(f"no O_DIRECT here: {error}")
    return tmp_path


def test_a_large_object_is_written_around_the_page_cache(disk: Path) -> None:
    """Of memory as snapshots have it all whole blocks go to the disk by O_DIRECT, and only the tail through the cache.

    So it is in the middle of a body too; what is small, or does not begin at a block, is written as ever.
    """
    large = memoryview(mmap.mmap(-1, (33 << 20) + 5))
    large[:] = pattern(large.nbytes)
    calls = Direct()
    store = LocalStore(disk / "run", calls=calls)
    store.put("a/large", [large])
    assert sum(calls.written[True]) == 33 << 20
    assert calls.written[False] == [5]
    store.put("a/two", [large[: 2 << 20], large[4096 : (2 << 20) + 4099]])
    assert sum(calls.written[True]) == 37 << 20
    store.put("a/small", [large[: (1 << 20) - 4096]])
    store.put("a/within", [large[1 : 2 << 20]])
    store.put("a/behind", [b"head", large[: 2 << 20]])
    assert sum(calls.written[True]) == 37 << 20
    assert (disk / "run/a/large").read_bytes() == bytes(large)
    assert (disk / "run/a/two").read_bytes() == bytes(large[: 2 << 20]) + bytes(large[4096 : (2 << 20) + 4099])


def test_a_file_system_that_refuses_direct_writes_late_gets_ordinary_ones(disk: Path) -> None:
    """P41: EINVAL at a write, not at open, loses and repeats no byte."""
    memory = np.frombuffer(pattern(5 << 20), np.uint8).copy()
    start = -memory.ctypes.data % 4096
    body = memory[start : start + (4 << 20)].data
    calls = NoDirect()
    LocalStore(disk / "run", calls=calls).put("a/b", [body])
    assert (disk / "run/a/b").read_bytes() == bytes(body)
    assert calls.refused == calls.written[True] == [1 << 20]
    assert sum(calls.written[False]) == 3 << 20


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


def test_an_adopted_object_is_durable_names_included(tmp_path: Path) -> None:
    """P35: the directory of a hard link to another run's object is fsynced, or cannot be on some network's disk."""
    other = LocalStore(tmp_path / "other")
    other.put("a/b", [b"x"])
    calls = FailingCalls(3, "refused", only="fsync", error=errno.EINVAL)  # after those of two directories
    assert LocalStore(tmp_path / "run", calls=calls).adopt(other, "a/b", 1)
    assert calls.where == f"fsync {tmp_path}/run/a"
    assert calls.log[-2] == ("link", f"{tmp_path}/run/a/b")


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
@pytest.mark.parametrize("call", quick_first(["open", "pwrite", "fsync", "link", "replace", "mkdir"], 2))
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


def test_a_new_file_whose_answer_was_lost_is_not_the_object(tmp_path: Path) -> None:
    """P32: over NFS the temporary file is made and refused as there already; the object is written all the same.

    A file system that refuses each one is an error, and no sign of another writer.
    """
    for n, write in enumerate((LocalStore.put_if_absent, LocalStore.replace)):
        calls = FailingCalls(1, "landed", error=errno.EEXIST, only="open", below=".tmp-")
        store = LocalStore(tmp_path / "run", calls=calls)
        write(store, f"ledger/{n}", b"x")
        assert calls.reached
        assert store.get(f"ledger/{n}", 9) == b"x"
    with pytest.raises(StoreError, match="said to exist already") as refused:
        LocalStore(tmp_path / "run", calls=NoNewFiles()).put_if_absent("ledger/2", b"x")
    assert not isinstance(refused.value, ObjectExistsError)


class NoNewFiles(WatchedCalls):
    """Every file that is to be new is said to exist."""

    def do(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        if name == "open" and ".tmp-" in path:
            raise FileExistsError(errno.EEXIST, "File exists")
        return super().do(name, path, call)


def test_a_link_whose_answer_was_lost_is_a_link(tmp_path: Path) -> None:
    """P32: over NFS a link can be made and reported as failed; two names on the file say that it was made."""
    calls = FailingCalls(1, "landed", only="link")
    LocalStore(tmp_path / "run", calls=calls).put_if_absent("ledger/1", b"x")
    assert calls.reached
    assert files(tmp_path / "run/ledger") == ["1"]
