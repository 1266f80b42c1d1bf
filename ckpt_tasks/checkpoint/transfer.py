"""Objects on their way from one store to another: nothing is put that was not compared with its digests."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Self

from ckpt_tasks.checkpoint.opening import READ_BYTES, verify_run
from ckpt_tasks.errors import IntegrityError, ObjectNotFoundError, StateError, StoreError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.index import IndexRow
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.manifest import ObjectRecord
from ckpt_tasks.storage.port import Store

__all__ = ["Transfer", "changes"]

_IN_FLIGHT = 8


class Transfer:
    """Objects on their way from one store to the other, one at a time, each in memory as a whole before it is put.

    The memory is a file without a name in TMPDIR: of an object of 2 GiB the kernel can write to disk and take back what
    it needs elsewhere, which it cannot of anonymous memory; and a copy that is killed leaves nothing of it.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        state: State,
        told: Callable[[int], None],
        given_up: frozenset[str] = frozenset(),
    ):
        self._source, self._target, self._state, self._told = source, target, state, told
        self._threads = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="ckpt-sync")
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `__exit__`)
        self._memory = memoryview(b"")
        self._given_up = given_up.union(state.retired)
        self._good: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._file.close()

    def bring(self, record: ObjectRecord, rows: Sequence[IndexRow]) -> tuple[int, int]:
        """See to it that the target has an object, verified; return how many bytes were copied, and found there.

        Raises IntegrityError or ObjectNotFoundError for what the source has, and StateError for an object that the
        target has given up: its deletion may still be under way.
        """
        if record.name in self._good or self._state.keeps(record.name):
            return 0, 0  # verified when what names it was committed
        if record.name in self._given_up:
            hint = "Copy to another directory."
            raise StateError(
                "the target has given up this object, and no name is used twice", key=record.name, hint=hint
            )
        there = self._size(record.name)
        found = there == record.size_bytes and self._is_good(record, rows)
        if not found:
            data = self._verified(self._source, record, rows)
            if there is None:
                self._target.put(record.name, [data])
            else:  # an earlier try was killed in the middle of it. A delete could come after another copy's commit.
                self._target.replace(record.name, data)
        self._good.add(record.name)
        return (0, record.size_bytes) if found else (record.size_bytes, 0)

    def check(self, records: Iterable[ObjectRecord]) -> None:
        """Raise StoreError unless the target has every object in its size."""
        for record in records:
            if self._size(record.name) != record.size_bytes:
                raise StoreError(
                    f"{self._target.url} does not have the object that was put there, or that it had",
                    key=record.name,
                    hint="Look at it with `ckpt verify`.",
                )

    def _is_good(self, record: ObjectRecord, rows: Sequence[IndexRow]) -> bool:
        with suppress(IntegrityError, ObjectNotFoundError):
            self._verified(self._target, record, rows)
            return True
        return False

    def _size(self, name: str) -> int | None:
        try:
            return self._target.size(name)
        except ObjectNotFoundError:
            return None
        except IntegrityError:
            return -1  # no object, whatever it is

    def _verified(self, store: Store, record: ObjectRecord, rows: Sequence[IndexRow]) -> memoryview:
        data = self._room(record.size_bytes)
        self._read(store, record.name, data)
        faults = changes(record, rows, data)
        if faults:  # what came may have been changed on the way
            self._read(store, record.name, data)
            faults = changes(record, rows, data)
        if faults:
            raise IntegrityError(faults[0])
        return data

    def _read(self, store: Store, name: str, data: memoryview) -> None:
        reads = [
            self._threads.submit(store.read, name, begin, data[begin : begin + READ_BYTES])
            for begin in range(0, data.nbytes, READ_BYTES)
        ]
        try:
            for at, one in enumerate(reads):
                one.result()
                self._told(min(READ_BYTES, data.nbytes - at * READ_BYTES))
        finally:
            for one in reads:
                one.cancel()
            wait(reads)  # a read that goes on would write into the next object

    def _room(self, size_bytes: int) -> memoryview:
        if self._memory.nbytes < size_bytes:
            self._memory = memoryview(b"")
            try:
                os.posix_fallocate(self._file.fileno(), 0, size_bytes)  # a map has no other way to say that it is full
            except OSError as error:
                raise StoreError(
                    f"no room for an object of {size_bytes} bytes in {tempfile.gettempdir()} ({error.strerror})",
                    hint="Set TMPDIR to a directory with room.",
                ) from error
            self._memory = memoryview(mmap.mmap(self._file.fileno(), size_bytes))
        return self._memory[:size_bytes]


def changes(record: ObjectRecord, rows: Iterable[IndexRow], data: memoryview) -> list[str]:
    """List what is not as it was written; bytes that no digest covers count as changed."""
    faults = []
    if digest_hex(data[: record.digested_bytes]) != record.digest:
        faults.append(f"bytes 0–{record.digested_bytes} of {record.name} have changed")
    covered = record.digested_bytes
    for row in sorted(rows, key=lambda row: (row.begin, row.end)):
        if row.begin > covered:
            break
        faults += verify_run([row], data[row.begin : row.end])
        covered = max(covered, row.end)
    if covered != record.size_bytes:
        faults.append(f"bytes {covered}–{record.size_bytes} of {record.name} have no digest")
    return faults
