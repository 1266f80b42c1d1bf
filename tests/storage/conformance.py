"""What every store must do, whatever the medium: inherit from StoreConformance and say how to look past the store.

The medium is always checked by a second, independent reader (`stored`), never by the store against itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.errors import CkptError, ConfigError, IntegrityError, ObjectExistsError, ObjectNotFoundError
from ckpt_tasks.storage.port import Store

PREFIX = "checkpoint_000000000005/e000001-0123456789abcdef/"


def pattern(size_bytes: int, seed: int = 1) -> bytes:
    """Return bytes in which no two aligned blocks are the same."""
    block = bytes((seed * 31 + n * n + n // 251) % 256 for n in range(4093))
    return (block * (size_bytes // 4093 + 1))[:size_bytes]


def files(root: Path) -> list[str]:
    """List everything below a directory, hidden and temporary names too."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


class StoreConformance:
    """The contract of `storage/port.py`, sentence by sentence."""

    many = 1100  # more than one page of a listing holds

    @pytest.fixture
    def store(self, tmp_path: Any) -> Store:
        raise NotImplementedError

    def again(self, store: Store) -> Store:
        """Open the same place a second time, as another process would."""
        raise NotImplementedError

    def stored(self, store: Store, name: str) -> bytes | None:
        """Read an object past the store; None where there is none."""
        raise NotImplementedError

    @pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, (1 << 20) + 1])
    def test_what_is_put_is_what_lies_there(self, store: Store, size_bytes: int) -> None:
        """P41: an object of any odd size has exactly its bytes on the medium, and is read back by every verb."""
        data = pattern(size_bytes)
        store.put(PREFIX + "model.safetensors", [data])
        assert self.stored(store, PREFIX + "model.safetensors") == data
        other = self.again(store)
        assert other.get(PREFIX + "model.safetensors", size_bytes) == data
        assert other.size(PREFIX + "model.safetensors") == size_bytes

    def test_several_buffers_become_one_object(self, store: Store) -> None:
        """An object is its buffers one after the other, empty ones and views of other things than bytes included."""
        pieces: list[bytes | memoryview] = [b"", b"abc", memoryview(bytearray(5000)), memoryview(pattern(3 << 20))]
        store.put("a/b", pieces)
        assert self.stored(store, "a/b") == b"".join(bytes(piece) for piece in pieces)

    @pytest.mark.parametrize(("begin", "count"), [(0, 0), (1, 4095), (5, 9995), (10_000, 0)])
    def test_a_range_is_read_into_a_buffer(self, store: Store, begin: int, count: int) -> None:
        """`read` fills exactly the buffer that it is given, from the byte that it is told."""
        data = pattern(10_000)
        store.put("a/b", [data])
        buffer = bytearray(b"-" * (count + 2))
        store.read("a/b", begin, memoryview(buffer)[1 : 1 + count])
        assert bytes(buffer) == b"-" + data[begin : begin + count] + b"-"

    @pytest.mark.parametrize(("begin", "count"), [(0, 11), (1000, 1), (5, 2 << 20)])
    def test_an_object_that_ends_early_is_an_error(self, store: Store, begin: int, count: int) -> None:
        """P48, P56: reading past an object's end says that the object is damaged, and leaves no old bytes in a hole."""
        store.put("a/b", [b"0123456789"])
        with pytest.raises(IntegrityError):
            store.read("a/b", begin, memoryview(bytearray(count)))

    def test_more_bytes_than_expected_are_not_taken_into_memory(self, store: Store) -> None:
        """An object larger than the reader asked for is refused before it is read."""
        store.put("a/b", [bytes(11)])
        with pytest.raises(IntegrityError, match="more than"):
            store.get("a/b", 10)
        assert store.get("a/b", 11) == bytes(11)

    def test_a_missing_object_is_said_to_be_missing(self, store: Store) -> None:
        """P47: every verb that reads says ObjectNotFoundError, with the name, and so in a place that does not exist."""
        for name in ("nothing", "no/such/thing"):
            for read in (
                lambda name=name: store.get(name, 10),
                lambda name=name: store.size(name),
                lambda name=name: store.read(name, 0, memoryview(bytearray(1))),
            ):
                with pytest.raises(ObjectNotFoundError) as caught:
                    read()
                assert caught.value.key == name
        assert store.names("") == []
        assert store.names("no/such/") == []

    @pytest.mark.parametrize("verb", ["put", "put_if_absent"])
    def test_a_name_that_is_taken_stays_what_it_was(self, store: Store, verb: str) -> None:
        """P31: no second write of a name succeeds or changes a byte, from wherever it comes."""
        store.put("a/b", [b"first"])
        for writer in (store, self.again(store)):
            with pytest.raises(ObjectExistsError) as caught:
                writer.put("a/b", [b"second"]) if verb == "put" else writer.put_if_absent("a/b", b"second")
            assert caught.value.key == "a/b"
        assert self.stored(store, "a/b") == b"first"
        assert store.names("") == ["a/b"]

    def test_of_racing_threads_one_wins(self, store: Store) -> None:
        """P33: of eight writers of one name one returns, the others are told so, and its bytes are what lies there."""
        writers = [self.again(store) for _ in range(8)]
        for round_ in range(10):
            start = threading.Barrier(8)

            def race(who: int, round_: int = round_, start: threading.Barrier = start) -> bytes | None:
                body = pattern(200, seed=who)
                start.wait()
                try:
                    writers[who].put_if_absent(f"ledger/{round_}.json", body)
                except ObjectExistsError:
                    return None
                return body

            with ThreadPoolExecutor(8) as threads:
                winners = [body for body in threads.map(race, range(8)) if body is not None]
            assert len(winners) == 1
            assert self.stored(store, f"ledger/{round_}.json") == winners[0]
        assert store.names("ledger/") == [f"ledger/{round_}.json" for round_ in range(10)]

    def test_replace_writes_and_overwrites(self, store: Store) -> None:
        """A heartbeat is written whether it is there or not, longer or shorter than before."""
        for body in (b"one", b"a longer one", b""):
            store.replace("heartbeat/000001.json", body)
            assert self.stored(store, "heartbeat/000001.json") == body
        assert store.names("") == ["heartbeat/000001.json"]

    def test_names_are_listed_in_order_and_by_prefix(self, store: Store) -> None:
        """P51: all names below a prefix come in the order of text, `limit` at most, and none of another prefix."""
        names = ["a/10", "a/9", "a/b/c", "ab/1", "b", "a_/1"]
        for name in names:
            store.put(name, [b"x"])
        assert self.again(store).names("") == sorted(names)
        assert store.names("a/") == ["a/10", "a/9", "a/b/c"]
        assert store.names("a/b/") == ["a/b/c"]
        assert store.names("a/", limit=2) == ["a/10", "a/9"]
        assert store.names("", limit=0) == []

    def test_many_names_are_all_listed(self, store: Store) -> None:
        """P54: a listing longer than a page is whole and in order."""
        names = [f"many/{n:05d}" for n in range(self.many)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda name: store.replace(name, b""), reversed(names)))
        assert store.names("many/") == names
        assert store.names("many/", limit=self.many - 99) == names[:-99]

    def test_deleting_is_done_once_and_can_be_repeated(self, store: Store) -> None:
        """P64: a deleted object is gone from every verb; deleting it again, or what never was, is not an error."""
        store.put("a/b/c", [b"x"])
        store.put("a/d", [b"y"])
        for _ in range(2):
            store.delete("a/b/c")
            store.delete("never/was")
        assert self.stored(store, "a/b/c") is None
        assert store.names("") == ["a/d"]
        with pytest.raises(ObjectNotFoundError):
            store.get("a/b/c", 10)
        store.put("a/b/c", [b"again"])
        assert self.stored(store, "a/b/c") == b"again"

    def test_several_are_asked_for_at_once(self, store: Store) -> None:
        """P64: the sizes of several come in their order; what is deleted is gone, the rest stays."""
        names = ["a/b/2", "a/b/1", "a/c", "a/b/3"]
        for size_bytes, name in enumerate(names, 3):
            store.put(name, [b"x" * size_bytes])
        assert store.sizes(names) == [3, 4, 5, 6]
        assert (store.sizes(names[3:]), store.sizes([])) == ([6], [])
        with pytest.raises(ObjectNotFoundError) as caught:
            store.sizes([*names, "a/b/4"])
        assert caught.value.key == "a/b/4"
        assert store.delete_all(["a/b/2", "never/was", "a/c", "a/b/1"]) == {}
        assert (store.delete_all(["a/b/2"]), store.delete_all([])) == ({}, {})
        assert store.names("") == ["a/b/3"]
        assert [self.stored(store, name) for name in names] == [None, None, None, b"x" * 6]

    def test_a_name_with_a_way_out_is_refused_by_every_verb(self, store: Store) -> None:
        """P42: a store checks every name once more, also a hostile one from a manifest, before it touches anything."""
        verbs: list[Callable[[str], object]] = [
            lambda name: store.put(name, [b"x"]),
            lambda name: store.put_if_absent(name, b"x"),
            lambda name: store.replace(name, b"x"),
            lambda name: store.get(name, 1),
            lambda name: store.read(name, 0, memoryview(bytearray(1))),
            store.size,
            lambda name: store.sizes([name, "a"]),
            store.delete,
        ]
        out = ["", "/", "/etc/passwd", "..", "a/../../b", "a//b", "a/", ".hidden", "a b", "http://h/x", "a\0b", "a\nb"]
        for use, name in product(verbs, out):
            with pytest.raises(ConfigError):
                use(name)
        for prefix in ("../", "/etc/", "a/../b/", ".hidden/"):
            with pytest.raises(ConfigError):
                store.names(prefix)
        assert store.names("") == []

    def test_errors_are_ours(self, store: Store) -> None:
        """No foreign exception crosses the port: a name below another object works, or is an error of ours."""
        store.put("a", [b"x"])
        with suppress(CkptError):
            store.put("a/b", [b"x"])
        with suppress(CkptError):
            store.put_if_absent("a/c", b"x")
        assert self.stored(store, "a") == b"x"
