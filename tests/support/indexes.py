"""Indexes for the tests: written and read back."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.layout.index import Index, IndexRow, read_index, write_index

__all__ = ["indexed", "read_as_committed"]


def read_as_committed(data: bytes) -> Index:
    """Read bytes as an index whose digest they fit."""
    return read_index(data, digest=digest_hex(data), name="index.arrow")


def indexed(rows: Sequence[IndexRow]) -> Index:
    """Write rows and read them back."""
    return read_as_committed(write_index(Index.of(rows)))
