"""Copy objects from one store to another.

Invariants

1. Every object that this process sends is compared with its digests before it is put.
2. No object of the target is replaced or deleted. If the target has an object already, it must have the same bytes. An
   object is put whole or not at all, even if the copy is killed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from operator import add
from typing import IO, NamedTuple, Self, cast

from ckpt_tasks.errors import IntegrityError, ObjectNotFoundError, StateError, StoreError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import Names
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.manifest import ObjectRecord
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.opening import READ_BYTES, by_object, changes_in, check_header, open_checkpoint
from ckpt_tasks.storage.port import Store

OnProgress = Callable[[int], None]  # The argument is the size of a read in bytes.


class Moved(NamedTuple):
    """How many bytes were linked, copied by the store, sent by this process, or found at the target."""

    linked_bytes: int = 0
    copied_bytes: int = 0
    sent_bytes: int = 0
    found_bytes: int = 0

    def plus(self, more: Moved) -> Moved:
        """Return the sum of two results."""
        return Moved(*map(add, self, more))


_IN_FLIGHT = 8


class Transfer:
    """Copies objects from one store to another, one at a time; an object to be sent is in memory as a whole.

    This memory is a mapped file without a name in TMPDIR: the kernel can write its pages to disk if memory is short,
    and a killed copy leaves no file. `adopts`: if the target can, it makes a hard link or its own copy of an object.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        state: State,
        on_progress: OnProgress,
        given_up: frozenset[str] = frozenset(),
        *,
        adopts: bool = False,
    ):
        self._source, self._target, self._state, self._on_progress = source, target, state, on_progress
        self._threads = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="ckpt-sync")
        self._adopts = adopts
        self._file: IO[bytes] | None = None
        self._memory = memoryview(b"")
        self._given_up = Names((*given_up, *state.retired))
        self._good: set[str] = set()
        self._of_attempt = {c.manifest.rpartition("/")[0]: c for c in state.live}
        # Search the newest checkpoint first; of checkpoints that reuse the same objects, keep only the newest.
        reusing = {c.reuses: c for c in state.live}.values()
        self._reusing = [(Names(c.reuses), c) for c in sorted(reusing, key=lambda c: -c.n)]
        self._committed: dict[str, Mapping[str, object]] = {}  # Digests by object name, for each checkpoint identity.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.close()

    def bring(self, record: ObjectRecord, rows: Sequence[IndexRow]) -> Moved:
        """Copy an object to the target if the target lacks it; verify its bytes, unless the target adopts the object.

        Raises IntegrityError or ObjectNotFoundError if the source's object is damaged or missing. Raises StateError if
        the target has other bytes under this name, or has given up the name: a deletion may still be under way.
        """
        if record.name in self._good:
            return Moved()
        if self._is_committed(record, rows):
            self._good.add(record.name)
            return Moved()  # The object was verified before the target committed the checkpoint that names it.
        if self._adopts and self._target.adopt(self._source, record.name, record.size_bytes):
            if rows and not self._target.near:
                check_header(self._target, record)
            return Moved(linked_bytes=record.size_bytes) if self._target.near else Moved(copied_bytes=record.size_bytes)
        if record.name in self._given_up:
            hint = "Copy to another directory."
            raise StateError(
                "the target has given up this object, and no name is used twice", key=record.name, hint=hint
            )
        is_there = self._is_there(record, rows)
        if not is_there:
            self._put(record.name, self._verified(self._source, record, rows))
        self._good.add(record.name)
        return Moved(found_bytes=record.size_bytes) if is_there else Moved(sent_bytes=record.size_bytes)

    def check(self, records: Iterable[ObjectRecord]) -> None:
        """Raise StoreError if an object is missing at the target, or has another size."""
        for record in records:
            if self._size(record.name) != record.size_bytes:
                raise StoreError(
                    f"{self._target.url} does not have the object that was put there, or that it had",
                    key=record.name,
                    hint="Look at it with `ckpt verify`.",
                )

    def _is_committed(self, record: ObjectRecord, rows: Sequence[IndexRow]) -> bool:
        """Return True if a live checkpoint of the target names this object, with the same digests."""
        reusing = next((c for names, c in self._reusing if record.name in names), None)
        checkpoint = reusing or self._of_attempt.get(record.name.rpartition("/")[0])
        if checkpoint is None:
            return False
        return self._committed_by(checkpoint).get(record.name) == _digests(record, rows)

    def _committed_by(self, checkpoint: Checkpoint) -> Mapping[str, object]:
        """Return the digests of a live checkpoint's objects at the target; {} if they cannot be read."""
        if checkpoint.manifest_digest not in self._committed:
            known: dict[str, object] = {}
            with suppress(IntegrityError, ObjectNotFoundError):
                opened = open_checkpoint(self._target, checkpoint)
                rows = by_object(opened.rows)
                records = (opened.manifest.index, *opened.manifest.objects)
                known = {record.name: _digests(record, rows.get(record.name, ())) for record in records}
            self._committed[checkpoint.manifest_digest] = known
        return self._committed[checkpoint.manifest_digest]

    def _is_there(self, record: ObjectRecord, rows: Sequence[IndexRow]) -> bool:
        size_bytes = self._size(record.name)
        if size_bytes is None:
            return False
        if size_bytes == record.size_bytes:
            with suppress(IntegrityError, ObjectNotFoundError):
                self._verified(self._target, record, rows)
                return True
        raise StateError(
            "the target has another object of this name, and nothing is replaced",
            key=record.name,
            hint="Copy to another directory, or let `ckpt prune` delete there what no checkpoint names.",
        )

    def _put(self, name: str, data: memoryview) -> None:
        if self._target.near:
            # On a disk, a killed `put` can leave a partial object. `put_if_absent` cannot; it also accepts a buffer.
            self._target.put_if_absent(name, cast(bytes, data))
        else:
            self._target.put(name, [data])

    def _size(self, name: str) -> int | None:
        try:
            return self._target.size(name)
        except ObjectNotFoundError:
            return None
        except IntegrityError:
            return -1  # The name belongs to something other than an object.

    def _verified(self, store: Store, record: ObjectRecord, rows: Sequence[IndexRow]) -> memoryview:
        size_bytes = store.size(record.name)
        if size_bytes != record.size_bytes:  # Check before reserving memory: the record may claim any size.
            raise IntegrityError(f"the object has {size_bytes} bytes of {record.size_bytes}", key=record.name)
        data = self._room(size_bytes)
        self._read(store, record.name, data)
        faults = changes(record, rows, data)
        if faults:  # Read again: the bytes may have changed during the read.
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
            for at, read in enumerate(reads):
                read.result()
                self._on_progress(min(READ_BYTES, data.nbytes - at * READ_BYTES))
        finally:
            for read in reads:
                read.cancel()
            wait(reads)  # A read that still runs would write into the memory of the next object.

    def _room(self, size_bytes: int) -> memoryview:
        if self._memory.nbytes < size_bytes:
            self._memory = memoryview(b"")
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `__exit__`)
            try:
                # Reserve the space: if the disk were full, a write to the mapping would kill the process.
                os.posix_fallocate(self._file.fileno(), 0, size_bytes)
            except OSError as error:
                raise StoreError(
                    f"no room for an object of {size_bytes} bytes in {tempfile.gettempdir()} ({error.strerror})",
                    hint="Set TMPDIR to a directory with room.",
                ) from error
            self._memory = memoryview(mmap.mmap(self._file.fileno(), size_bytes))
        return self._memory[:size_bytes]


def _digests(record: ObjectRecord, rows: Iterable[IndexRow]) -> object:
    return record, sorted((row.begin, row.end, row.digest) for row in rows)


def changes(record: ObjectRecord, rows: Iterable[IndexRow], data: memoryview) -> list[str]:
    """List the parts of an object that have changed; bytes without a digest count as changed."""
    faults = []
    if digest_hex(data[: record.digested_bytes]) != record.digest:
        faults.append(f"bytes 0–{record.digested_bytes} of {record.name} have changed")
    covered = record.digested_bytes
    for row in sorted(rows, key=lambda row: (row.begin, row.end)):
        if row.begin > covered:
            break
        faults += changes_in([row], data[row.begin : row.end])
        covered = max(covered, row.end)
    if covered != record.size_bytes:
        faults.append(f"bytes {covered}–{record.size_bytes} of {record.name} have no digest")
    return faults
