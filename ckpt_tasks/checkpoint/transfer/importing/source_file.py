"""Read one foreign file: its bytes, views that map it, and the records of a zip file that torch.save wrote.

Invariants

1. Bytes are read only by `pread`: if another process cut the file, a read of the mapping would kill this process
   (SIGBUS). The mapping only gives tensors an identity; `copied` reads their bytes.
2. A zip file is refused if two readers could read it differently. It must have one central directory, at the end, and
   uncompressed records with different names.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import weakref
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ckpt_tasks.errors import ConfigError, IntegrityError

_MAX_ENTRIES = 1 << 20  # A zip file may have at most this many records: torch.save writes one for each storage.
_PIECE_BYTES = 8 << 20
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # With this flag a mapping may be larger than the memory.
# The last record of a zip file: signature, disk numbers, entries (twice), size and begin of the directory, comment.
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")


class Record(NamedTuple):
    """A record of a zip file: its byte range in the file, and its CRC-32 (0 if the writer computed none)."""

    begin: int
    end: int
    crc: int

    @property
    def nbytes(self) -> int:
        """The record's size in bytes."""
        return self.end - self.begin


class SourceFile:
    """An open regular file; raises ConfigError if the path is something else, such as a pipe."""

    def __init__(self, path: Path):
        self.name = path.name
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a regular file")
        self.size_bytes = status.st_size
        self._records: dict[str, Record] = {}
        self._status = (status.st_size, status.st_mtime_ns)
        self._mapped: torch.UntypedStorage | None = None

    def read(self, begin: int, end: int) -> memoryview:
        """Return the bytes from `begin` to `end`; raise IntegrityError if the file ends earlier."""
        data = memoryview(bytearray(max(end - begin, 0) if end <= self.size_bytes else 0))
        done = 0
        while done < data.nbytes and (n := os.preadv(self._fd, [data[done:]], begin + done)):
            done += n
        if done < end - begin or begin < 0:
            raise IntegrityError(f"the file ends before byte {end}", key=self.name)
        return data

    def check(self, on_progress: Callable[[int], None]) -> None:
        """Compare the CRC of every record with its bytes; raise IntegrityError if they differ."""
        for name in self._records:
            self._check(name, on_progress)

    def record(self, name: str) -> bytes:
        """Return the bytes of a small record after checking them."""
        self._check(name, lambda size_bytes: None)
        return self.read(*self._records[name][:2]).tobytes()

    def _check(self, name: str, on_progress: Callable[[int], None]) -> None:
        begin, end, expected = self._records[name]
        crc = 0
        for at in range(begin, end, _PIECE_BYTES):
            piece = self.read(at, min(at + _PIECE_BYTES, end))
            crc = zlib.crc32(piece, crc)
            on_progress(piece.nbytes)
        if expected and crc != expected:  # torch.serialization.set_crc32_options(False) writes 0.
            raise IntegrityError("its bytes do not have the CRC that the zip file says", key=f"{self.name}: {name}")

    def has_changed(self) -> bool:
        """Return True if the file has been written, or has another size, since it was opened."""
        status = os.fstat(self._fd)
        return (status.st_size, status.st_mtime_ns) != self._status

    def mapped(self, begin: int, end: int) -> torch.UntypedStorage:
        """Return a storage that maps bytes of the file, for views; only `copied` may read these bytes."""
        if self._mapped is None:
            try:
                mapping = mmap.mmap(self._fd, self.size_bytes, flags=mmap.MAP_PRIVATE | _NO_RESERVE)
            except ValueError as error:
                raise IntegrityError("the file was cut while it was read", key=self.name) from error
            self._mapped = torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()
        view: torch.UntypedStorage = self._mapped[begin:end]
        return view

    def copied(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy in memory of a tensor that is a view of this file; None for any other tensor."""
        begin = tensor.data_ptr() - self._mapped.data_ptr() if self._mapped is not None else -1
        if not 0 <= begin < self.size_bytes:
            return None
        reach = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        data = self.read(begin, begin + reach * tensor.itemsize)
        storage = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())

    def records(self) -> dict[str, Record]:
        """Return a zip file's records, by name without the top folder; raise IntegrityError if the file is damaged."""
        self._check_end()
        try:
            with self._archive() as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, IndexError) as error:
            raise IntegrityError(f"the file is cut or damaged: {error}", key=self.name) from error
        if any(entry.filename.endswith("/constants.pkl") for entry in entries):
            raise ConfigError(f"{self.name} is a TorchScript archive", hint="Save the module's state_dict() instead.")
        if any(e.compress_type != zipfile.ZIP_STORED or e.flag_bits & 1 for e in entries):
            raise IntegrityError("the zip file is compressed or encrypted, which torch.save never does", key=self.name)
        claimed = sum(entry.file_size for entry in entries)
        if claimed > self.size_bytes:
            raise IntegrityError(f"the zip file claims {claimed} bytes, and has {self.size_bytes}", key=self.name)
        tops = {entry.filename.partition("/")[0] for entry in entries}
        names = {entry.filename.lower() for entry in entries}  # torch treats a and A as the same name.
        if len(tops) != 1 or len(names) != len(entries) or any(e.filename != e.orig_filename for e in entries):
            raise IntegrityError("the zip file is not one that torch.save writes", key=self.name)
        self._records = {entry.filename.partition("/")[2]: self._place(entry) for entry in entries}
        return self._records

    def _archive(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(os.fdopen(self._fd, "rb", closefd=False))

    def _place(self, entry: zipfile.ZipInfo) -> Record:
        head = self.read(entry.header_offset, entry.header_offset + 30).tobytes()
        begin = entry.header_offset + 30 + sum(struct.unpack_from("<HH", head, 26))
        end = begin + entry.file_size
        if head[:4] != b"PK\3\4" or end > self.size_bytes or entry.compress_size != entry.file_size:
            raise IntegrityError("a record is not where the zip file says", key=f"{self.name}: {entry.filename:.80}")
        return Record(begin, end, entry.CRC)

    def _check_end(self) -> None:
        """Raise IntegrityError if the file does not end with one central directory that every reader would find."""
        tail = bytes(self.read(max(self.size_bytes - 98, 0), self.size_bytes)).rjust(98, b"\0")
        sign, *disks, here, entries, size, begin, comment = _END.unpack(tail[-22:])
        short, at = (here, entries, size, begin), self.size_bytes - 22
        locator = _LOCATOR.unpack(tail[-42:-22])
        fits = True
        if locator[0] == b"PK\6\7":
            at = self.size_bytes - 98
            sign64, _, _, _, *disks64, here, entries, size, begin = _END64.unpack(tail[:56])
            known = zip(short, (here, entries, size, begin), (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF), strict=True)
            fits = sign64 == b"PK\6\6" and locator[1:] == (0, at, 1) and not any(disks64)
            fits = fits and all(one in (other, most) for one, other, most in known)
        if not fits or sign != b"PK\5\6" or any(disks) or comment or here != entries or begin + size != at:
            raise IntegrityError("the file is cut or damaged: no single directory at its end", key=self.name)
        if size > _MAX_ENTRIES * 128 or entries > _MAX_ENTRIES:
            raise IntegrityError(f"the zip file has more than {_MAX_ENTRIES} records", key=self.name)
