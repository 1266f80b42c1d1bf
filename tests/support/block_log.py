"""A disk that writes down every write and every flush, and the disks that a loss of power could have left of it.

The disk is a file that a process of ours serves to the kernel, with a loop device above it. A FUSE mount whose root is
the file itself takes so few requests that they are answered here, without a library (the protocol: linux/fuse.h).

What a disk owes: a write that ended before a flush began is there afterwards. Of the writes since, any part may be
there, in blocks of 4 KiB, in any order. Writes and flushes arrive here one after another, since the loop device above
waits for every answer; so what a disk with a deep queue could do beyond this is not tried.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import struct
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BLOCK_BYTES = 4096
KEEPS: tuple[Keep, ...] = ("all", "none", "writes", "blocks", "small writes")

# Of what was not flushed: about every second write, every second block, every second block of large writes.
Keep = Literal["all", "none", "writes", "blocks", "small writes"]

_WRITE_BYTES = 1 << 20
_REQUEST = struct.Struct("=IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, extensions, padding
_ANSWER = struct.Struct("=IiQ")  # length, error, unique
_RANGE = struct.Struct("=QQI")  # handle, offset, size: how reads and writes begin
_WRITE_HEADER_BYTES = 40
_GETATTR, _OPEN, _READ, _WRITE, _RELEASE, _FSYNC, _FLUSH, _INIT, _DESTROY = 3, 14, 15, 16, 18, 20, 25, 26, 38
_UNANSWERED = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET
_LARGE_BYTES = 64 << 10
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
_KEEP_CACHE = 2
_FOR_EVER_S = 1 << 30
_RECORD = struct.Struct("=cQQ")  # what, offset, size; then the bytes of a write
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have this process killed when its parent ends: nobody else would."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


# ── the disk ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def logged_disk(image: Path, log: Path, at: Path) -> Iterator[None]:
    """Serve `image` as the file `at` and append what is done to it to `log`; for one's own mount namespace."""
    at.touch()
    command = [sys.executable, "-m", "tests.support.block_log", *map(str, (image, log, at))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            if server.stdout.readline() != b"ready\n":
                raise RuntimeError("the logged disk was not mounted")
            yield
            # Lazily: the loop device above lets go of it a moment after its own file system is unmounted.
            subprocess.run(["umount", "-l", at], check=True)
            if server.wait(timeout=60) != 0:
                raise RuntimeError("the logged disk failed: its log is not whole")
        finally:
            server.kill()


class _Server:
    """Answer the kernel's requests for one file."""

    def __init__(self, image: Path, log: Path, at: Path):
        self._image = os.open(image, os.O_RDWR)
        self._size_bytes = os.fstat(self._image).st_size
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._kernel = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._kernel},rootmode=100000,user_id=0,group_id=0"
        if _LIBC.mount(b"block_log", os.fsencode(at), b"fuse", 0, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(at))

    def run(self) -> None:
        """Answer until the file system is unmounted."""
        buffer = bytearray(_WRITE_BYTES + 2 * BLOCK_BYTES)
        while True:
            try:
                count = os.readv(self._kernel, [buffer])
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue  # the request was taken back
                raise
            self._answer(memoryview(buffer)[:count])

    def _answer(self, request: memoryview) -> None:
        _, opcode, unique, *_ = _REQUEST.unpack_from(request)
        if opcode in _UNANSWERED:
            return
        body = self._body(opcode, request[_REQUEST.size :])
        error, body = (-errno.ENOSYS, b"") if body is None else (0, body)
        try:
            os.writev(self._kernel, [_ANSWER.pack(_ANSWER.size + len(body), error, unique), body])
        except FileNotFoundError:
            return  # whoever asked has been interrupted meanwhile

    def _body(self, opcode: int, arguments: memoryview) -> bytes | None:
        if opcode == _INIT:
            wanted, pages = _BIG_WRITES | _MAX_PAGES, _WRITE_BYTES // BLOCK_BYTES
            return struct.pack("=4I2H2I2H8I", 7, 31, 0, wanted, 1, 1, _WRITE_BYTES, 1, pages, 0, *[0] * 8)
        if opcode == _GETATTR:
            numbers = (1, self._size_bytes, self._size_bytes // 512, 0, 0, 0)
            return struct.pack("=QII6Q10I", _FOR_EVER_S, 0, 0, *numbers, 0, 0, 0, 0o100600, 1, 0, 0, 0, BLOCK_BYTES, 0)
        if opcode == _OPEN:
            return struct.pack("=QII", 0, _KEEP_CACHE, 0)
        if opcode == _READ:
            _, offset, size_bytes = _RANGE.unpack_from(arguments)
            return os.pread(self._image, size_bytes, offset)
        if opcode == _WRITE:
            _, offset, size_bytes = _RANGE.unpack_from(arguments)
            data = arguments[_WRITE_HEADER_BYTES : _WRITE_HEADER_BYTES + size_bytes]
            self._record(b"w", offset, data)
            os.pwrite(self._image, data, offset)
            return struct.pack("=II", size_bytes, 0)
        if opcode == _FSYNC:
            self._record(b"f", 0, memoryview(b""))
        # The kernel does without what is not known here.
        return b"" if opcode in (_FSYNC, _RELEASE, _FLUSH, _DESTROY) else None

    def _record(self, what: bytes, offset: int, data: memoryview) -> None:
        record = _RECORD.pack(what, offset, len(data)) + bytes(data)
        assert os.write(self._log, record) == len(record)


# ── what is left of it ───────────────────────────────────────────────────────────────────────────────────────────


class Event(NamedTuple):
    """A write, or a flush where `data` is None; `end` is the size of the log, in bytes, once it is there."""

    offset: int
    data: memoryview | None
    end: int


def read_log(log: Path) -> list[Event]:
    """Read the events in the order in which they came."""
    held, at, events = memoryview(log.read_bytes()), 0, list[Event]()
    while at < len(held):
        what, offset, size_bytes = _RECORD.unpack_from(held, at)
        end = at + _RECORD.size + size_bytes
        events.append(Event(offset, held[at + _RECORD.size : end] if what == b"w" else None, end))
        at = end
    return events


class Replay:
    """Make the disks that a loss of power could have left, for one moment after another.

    `base` is the disk before the first event. A moment is a number of events that have come. The last `lies` flushes
    before it were answered and not done.
    """

    def __init__(self, base: bytes, events: list[Event], *, lies: int = 0):
        self.events = events
        self._ends = [event.end for event in events]
        self._flushes = [n for n, event in enumerate(events) if event.data is None]
        self._lies = lies
        self._durable = bytearray(base)
        self._done = 0

    def moment(self, log_bytes: int) -> int:
        """Return how many events had come when the log had this size."""
        return bisect_right(self._ends, log_bytes)

    def log_bytes(self, moment: int) -> int:
        """Return the size of the log at a moment."""
        return self._ends[moment - 1] if moment else 0

    def disk(self, moment: int, keep: Keep, choose: random.Random) -> bytearray:
        """Return the disk that power loss leaves at a moment, which must not lie before the last one asked for."""
        past = bisect_right(self._flushes, moment - 1) - self._lies
        flushed = self._flushes[past - 1] if past > 0 else 0
        assert flushed >= self._done
        for event in self.events[self._done : flushed]:
            _write(self._durable, event.offset, event.data)
        self._done = flushed
        left = bytearray(self._durable)
        for event in self.events[flushed:moment]:
            _write_some(left, event, keep, choose)
        return left


def _write_some(disk: bytearray, event: Event, keep: Keep, choose: random.Random) -> None:
    if event.data is None or keep == "none" or (keep == "writes" and choose.random() < 0.5):
        return
    if keep in ("all", "writes") or (keep == "small writes" and len(event.data) < _LARGE_BYTES):
        _write(disk, event.offset, event.data)
        return
    for begin in range(0, len(event.data), BLOCK_BYTES):
        if choose.random() < 0.5:
            _write(disk, event.offset + begin, event.data[begin : begin + BLOCK_BYTES])


def _write(disk: bytearray, offset: int, data: memoryview | None) -> None:
    if data is not None:
        disk[offset : offset + len(data)] = data


if __name__ == "__main__":
    die_with_parent()
    server = _Server(*map(Path, sys.argv[1:]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.run()
