"""Allocate pages of memory before training needs them.

The first touch of a page takes several times as long as a copy of the page. A thread that allocates ahead gives way to
training.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_HUGEPAGE, _POPULATE_WRITE = 14, 23
_TOUCHED_BYTES = 16 << 20  # Touch this many bytes at once.


class GaveWay(Exception):  # noqa: N818 (it is not an error)
    """Raised when memory that is being made ahead is no longer wanted; the slot is incomplete."""


def advise_huge(memory: memoryview) -> None:
    """Ask for huge pages. This is only advice: a kernel without them refuses it, and ordinary pages suffice."""
    _madvise(_address(memory), len(memory), _HUGEPAGE)


def allocate_pages(files: Mapping[str, int], sizes: Mapping[str, int], wanted: Callable[[], bool]) -> None:
    """Allocate all pages of a slot's files (name → descriptor); raise GaveWay once `wanted()` is false."""
    for name, fd in files.items():
        if has_all_pages(os.fstat(fd), sizes[name]):
            continue
        for begin in range(0, max(sizes[name], 1), _TOUCHED_BYTES):
            if not wanted():
                raise GaveWay
            # This raises ENOSPC on a full disk; after ftruncate, the first write would raise SIGBUS.
            os.posix_fallocate(fd, begin, min(_TOUCHED_BYTES, max(sizes[name], 1) - begin))


def touch(memory: memoryview, wanted: Callable[[], bool]) -> None:
    """Have the kernel allocate all pages of a mapping now, as long as `wanted()` is true; their contents stay.

    This takes several times as long as a copy; other threads may fill the memory meanwhile. Linux before 5.14 cannot do
    it, and allocates pages when they are filled.
    """
    for begin in range(0, len(memory), _TOUCHED_BYTES):
        if not wanted():
            return
        # MAP_POPULATE would allocate all pages in one call, which cannot give way.
        _madvise(_address(memory) + begin, min(_TOUCHED_BYTES, len(memory) - begin), _POPULATE_WRITE)


def has_all_pages(status: os.stat_result, size_bytes: int) -> bool:
    """Return True if a file has this size and all its pages."""
    return status.st_size == max(size_bytes, 1) and 512 * status.st_blocks >= size_bytes


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
