"""Divide reading among the ranks of a host: every wanted region is read once, by one rank that wants it.

Every rank writes its list of regions into a file in memory. The other ranks of the host read it, so all of them compute
the same division. With `kept`, the bytes of the regions are read into such files, too.

Invariants

1. Every region that a rank wants is read by exactly one rank of its host, which also wants it.
2. The files have no names: a killed process leaves nothing behind.
3. All ranks of a host share the reads, or none does: if a rank cannot open another's file, each reads for itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tasks.checkpoint.ranks.exchange import Together
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.process import NAMELESS, close_descriptor, map_memory, open_descriptor, open_nameless
from ckpt_tasks.run.opening import READ_BYTES
from ckpt_tasks.storage.local_fs import write_at
from ckpt_tasks.system import host_name, system

_PAGE = 4096

Spans = Mapping[str, npt.NDArray[np.int64]]  # The begin and end of each region, for each object.


class Readers(NamedTuple):
    """The readers of one object's regions, and where the regions are in the shared memory.

    `by_begin` maps the first byte of a region to the rank that reads it, as the rank's number on this host. `shift` is
    added to a byte's offset in the object to get its offset in memory.
    """

    by_begin: Mapping[int, int]
    shift: int


class ReadShare(NamedTuple):
    """The reader of each region, this rank's `place` among the ranks of its host, and the memory that they share."""

    place: int
    readers: Mapping[str, Readers]
    memory: Sequence[memoryview]

    def mine(self, rows: Iterable[IndexRow]) -> list[IndexRow]:
        """List the rows that this rank reads; empty tensors need no read."""
        return [row for row in rows if row.begin < row.end and self._reader(row) == self.place]

    def at(self, row: IndexRow) -> tuple[memoryview, int]:
        """Return the memory that holds a region, and the offset of the region in it."""
        if row.begin == row.end:
            return memoryview(b""), 0
        return self.memory[self._reader(row)], self.readers[row.object].shift + row.begin

    def _reader(self, row: IndexRow) -> int:
        return self.readers[row.object].by_begin[row.begin]


def divide(wants: Sequence[Spans]) -> tuple[dict[str, Readers], int]:
    """Choose a reader for every wanted region; also return how many bytes of memory the readers need together.

    Ranks that want the same regions take turns every 16 MiB of an object, so that each reads long stretches.
    """
    readers, size_bytes = {}, 0
    for number, name in enumerate(sorted({name for spans in wants for name in spans})):
        here = [(place, spans[name]) for place, spans in enumerate(wants) if name in spans]
        spans = np.concatenate([one for _, one in here])
        places = np.repeat([place for place, _ in here], [len(one) for _, one in here])
        order = np.lexsort((places, spans[:, 0]))
        begins = spans[order, 0]
        first = np.flatnonzero(np.r_[True, begins[1:] != begins[:-1]])
        turns = (begins[first] // READ_BYTES + number) % np.diff(np.r_[first, len(begins)])
        base = int(begins[0]) // _PAGE * _PAGE
        by_begin = dict(zip(begins[first].tolist(), places[order][first + turns].tolist(), strict=True))
        readers[name] = Readers(by_begin, size_bytes - base)
        size_bytes += -(-(int(spans[:, 1].max()) - base) // _PAGE) * _PAGE
    return readers, size_bytes


def share_reads(together: Together, rows: Iterable[IndexRow], *, kept: bool) -> ReadShare | None:
    """Agree with the other ranks of this host on the reader of each region; return None if this rank reads for itself.

    `kept`: the bytes stay in memory that all these ranks map. All ranks must call it.
    """
    if together.size == 1:
        return None
    with ExitStack() as files:
        token = system().token_hex(8)
        try:
            own = _nameless(files), _nameless(files)
            write_at(own[0], _written(token, rows), 0)
            word = json.dumps([host_name(), token, os.getpid(), *own])
        except OSError:
            word = json.dumps(["", token, 0, 0, 0])
        words = json.loads(together(word.encode(), _joined))
        host = words[together.rank][0]
        here = [rank for rank, (name, *_) in enumerate(words) if name == host] if host else [together.rank]
        try:
            shared = _joint(files, [words[rank][1:] for rank in here], here.index(together.rank), kept=kept)
        except (OSError, ValueError, TypeError):
            shared = None
        opened = json.loads(together(b"0" if shared is None else b"1", _joined))
        return shared if len(here) > 1 and all(opened[rank] for rank in here) else None


def _joint(files: ExitStack, words: Sequence[tuple[str, int, int, int]], place: int, *, kept: bool) -> ReadShare | None:
    """Read which regions each rank of the host wants, choose the readers, and map the shared memory.

    `words` has for each rank (token, process id, descriptor of its list, descriptor of its memory); this rank's are at
    `place`. Returns None if this rank is alone on its host; raises OSError if another rank's files cannot be opened.
    """
    if len(words) == 1:
        return None
    wants = [_read(_opened(files, pid, number, os.O_RDONLY), token) for token, pid, number, _ in words]
    readers, size_bytes = divide(wants)
    memory = []
    if kept and size_bytes:
        for n, (_, pid, _, number) in enumerate(words):
            fd = _opened(files, pid, number, os.O_RDWR)
            if n == place:
                os.ftruncate(fd, size_bytes)
            memory.append(map_memory(size_bytes, fd))  # A mapping takes no memory until bytes are read.
    return ReadShare(place, readers, memory)


def _nameless(files: ExitStack) -> int:
    fd = open_nameless()
    files.callback(close_descriptor, fd)
    return fd


def _opened(files: ExitStack, pid: int, number: int, flags: int) -> int:
    """Open another rank's file in memory; raise OSError or ValueError for any other file.

    A foreign program may have sent the word that names the file: c10d's store does not authenticate.
    """
    fd = open_descriptor(Path(f"/proc/{pid:d}/fd/{number:d}"), flags | os.O_NONBLOCK)
    files.callback(close_descriptor, fd)
    if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{NAMELESS}"):
        raise OSError("the file is not memory of a rank")
    return fd


def _written(token: str, rows: Iterable[IndexRow]) -> bytes:
    """Return the begin and end of each row's region, by object, as the bytes of a file."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        if row.begin < row.end:
            spans.setdefault(row.object, []).append((row.begin, row.end))
    head = json.dumps([token, {name: len(here) for name, here in spans.items()}])
    return head.encode() + b"\n" + np.array([span for here in spans.values() for span in here], np.int64).tobytes()


def _read(fd: int, token: str) -> Spans:
    """Read the bytes of `_written`; raise OSError if the file is another process's."""
    with open(fd, "rb", closefd=False) as file:
        head, _, data = file.read().partition(b"\n")
    if token.encode() not in head:
        raise OSError("the file is of another process")
    numbers = np.frombuffer(data, np.int64).reshape(-1, 2)
    wants, at = {}, 0
    for name, count in json.loads(head)[1].items():
        wants[name] = numbers[at : at + count]
        at += count
    return wants


def _joined(words: list[bytes]) -> bytes:
    return b"[" + b",".join(words) + b"]"
