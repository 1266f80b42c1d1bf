"""One slot of a memory directory as a readable store, and its tensors, verified and copied in place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch

from ckpt_tasks.checkpoint.memory.memory import SlotFiles
from ckpt_tasks.errors import IntegrityError, ObjectNotFoundError
from ckpt_tasks.format.digests import digest_bytes
from ckpt_tasks.format.keys import is_group_file
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.process import in_threads
from ckpt_tasks.run.opening import change
from ckpt_tasks.state.tensors.placements import local_pairs
from ckpt_tasks.state.tensors.tensors import copy_all, tensor_at
from ckpt_tasks.storage.port import ReadableStore

# Each reader only digests, so readers do not wait for each other; no training runs beside a restore.
_READERS = max(2, min(16, os.cpu_count() or 2))


class SlotStore:
    """A slot as a readable store; its files have the names that they have in storage after a commit.

    A slot lacks files of groups that older checkpoints wrote: these are read from storage.
    """

    near = True
    gap_bytes = 0

    def __init__(self, memory: SlotFiles, slot: str, storage: ReadableStore):
        self._storage = storage
        self._fetched: dict[str, memoryview] = {}
        self.url = memory.url
        self._memory = memory
        self._slot = slot

    def get(self, name: str, max_bytes: int) -> bytes:
        """Return the bytes of a file of the slot; raise IntegrityError if there are more than `max_bytes`."""
        data = self.map(name)
        if len(data) > max_bytes:
            raise IntegrityError(f"the file has {len(data)} bytes, more than {max_bytes}", key=name)
        return bytes(data)

    def read(self, name: str, begin: int, into: memoryview) -> None:
        """Fill a buffer from a file of the slot; raise IntegrityError if the file ends early."""
        data = self.map(name)
        if begin + into.nbytes > len(data):
            raise IntegrityError(f"the file ends at byte {len(data)}", key=name)
        into[:] = data[begin : begin + into.nbytes]

    def size(self, name: str) -> int:
        """Return the size in bytes of a file of the slot."""
        return len(self.map(name))

    def map(self, name: str) -> memoryview:
        """Map a file of the slot; raises ObjectNotFoundError and IntegrityError."""
        try:  # Ignore the attempt in the name: a slot holds a whole snapshot, including reused objects.
            return self._memory.open(self._slot, name.rpartition("/")[2])
        except FileNotFoundError as error:
            if not is_group_file(name):
                raise ObjectNotFoundError("no such file in this snapshot", key=name) from error
            if name not in self._fetched:
                self._fetched[name] = memoryview(bytearray(self._storage.size(name)))
                self._storage.read(name, 0, self._fetched[name])
            return self._fetched[name]
        except OSError as error:
            raise IntegrityError(f"the file cannot be mapped: {error}", key=name) from error


class MappedTensors:
    """The tensors of `rows` in a slot, verified and copied in place."""

    def __init__(self, store: SlotStore, rows: Iterable[IndexRow]):
        self._rows = list(rows)
        self._first: dict[str, IndexRow] = {}
        for row in sorted(self._rows, key=lambda row: (row.object, row.begin)):
            self._first.setdefault(row.full_key, row)
        self._maps = {name: store.map(name) for name in {row.object for row in self._rows}}
        self._fills: list[tuple[torch.Tensor, str]] = []

    def like(self, key: str) -> torch.Tensor:
        row = self._first[key]
        return torch.empty(row.tensor_shape, dtype=getattr(torch, row.dtype), device="meta")

    def read(self, key: str) -> torch.Tensor:
        _verify([row for row in self._rows if row.full_key == key], self._maps)
        return self._at(key)

    def fill(self, into: torch.Tensor, key: str) -> None:
        self._fills.append((into, key))

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, str]] = ()) -> None:
        share = -(-len(self._rows) // (4 * _READERS)) or 1
        shares = [self._rows[at : at + share] for at in range(0, len(self._rows), share)]
        in_threads(lambda rows: _verify(rows, self._maps), shares, _READERS, "ckpt-verify")
        fills, self._fills = self._fills, []
        self.copy(fills)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, str]]) -> None:
        copy_all([(into, self._at(key)) for into, key in local_pairs(pairs)])

    def _at(self, key: str) -> torch.Tensor:
        row = self._first[key]
        return tensor_at(self._maps[row.object], row.dtype, row.tensor_shape, row.begin)


def _verify(rows: Iterable[IndexRow], maps: dict[str, memoryview]) -> None:
    for row in rows:
        if row.end > len(maps[row.object]):
            raise IntegrityError(f"the file has {len(maps[row.object])} bytes", key=row.object)
        if digest_bytes(maps[row.object][row.begin : row.end]) != row.digest:
            raise IntegrityError(change(row))
