"""One slot of a memory directory as a readable store."""

from __future__ import annotations

import numpy as np

from ckpt_tasks.checkpoint.memory.memory import SlotFiles
from ckpt_tasks.errors import IntegrityError, ObjectNotFoundError
from ckpt_tasks.format.keys import is_group_file
from ckpt_tasks.storage.port import ReadableStore


class SlotStore:
    """A slot as a readable store; its files have the names that they have in storage after a commit.

    A slot lacks files of groups that older checkpoints wrote: these are read from storage.
    """

    near = True
    gap_bytes = 0

    def __init__(self, memory: SlotFiles, slot: str, storage: ReadableStore):
        self._storage = storage
        self._files: dict[str, memoryview] = {}
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
        there = np.frombuffer(into, np.uint8)
        np.copyto(there, np.frombuffer(data, np.uint8, into.nbytes, begin))  # Other threads run meanwhile.

    def size(self, name: str) -> int:
        """Return the size in bytes of a file of the slot."""
        return len(self.map(name))

    def map(self, name: str) -> memoryview:
        """Map a file of the slot; raises ObjectNotFoundError and IntegrityError."""
        file = name.rpartition("/")[2]  # Ignore the attempt in the name: a slot holds a whole snapshot.
        if file not in self._files:
            self._files[file] = self._open(name, file)
        return self._files[file]

    def _open(self, name: str, file: str) -> memoryview:
        try:
            return self._memory.open(self._slot, file)
        except FileNotFoundError as error:
            if not is_group_file(name):
                raise ObjectNotFoundError("no such file in this snapshot", key=name) from error
            fetched = memoryview(bytearray(self._storage.size(name)))
            self._storage.read(name, 0, fetched)
            return fetched
        except OSError as error:
            raise IntegrityError(f"the file cannot be mapped: {error}", key=name) from error
