"""A pack: the files of one directory as the bytes of one object; the same files give the same bytes.

A pack holds a line with the length of the table, the table (canonical JSON: a list of [path, size], sorted by path),
then the files' bytes in the table's order. The pack's name has its digest. No path leads out of the directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.digests import canonical_json

MAX_PACK_BYTES = 256 << 20
_MAX_FILES = 100_000
_MAX_DEPTH = 16
_HEAD = re.compile(rb"ckpt-pack 1 ([0-9]{1,9})\n")
# No part of a path begins with a dot: that excludes ".", ".." and temporary files.
_PART = re.compile(r"[A-Za-z0-9_+=@-][A-Za-z0-9_.+=@-]{0,254}", re.ASCII)


def is_packed_path(path: str) -> bool:
    """Return True if a pack may hold a file with this relative path."""
    parts = path.split("/")
    return len(parts) <= _MAX_DEPTH and all(_PART.fullmatch(part) for part in parts)


def pack_files(files: Mapping[str, bytes]) -> list[bytes]:
    """Return a pack as pieces of bytes; raise IntegrityError for a path that a pack cannot hold."""
    for path in files:
        if not is_packed_path(path):
            raise IntegrityError("a pack cannot hold this path", key=path)
    table = canonical_json([[path, len(files[path])] for path in sorted(files)])
    return [b"ckpt-pack 1 %d\n" % len(table), table, *(files[path] for path in sorted(files))]


def unpack_files(data: bytes) -> Iterator[tuple[str, memoryview]]:
    """Check the table of a pack, then yield path and bytes of each file; raise IntegrityError for a malformed pack."""
    head = _HEAD.match(data)
    begin = head.end() + int(head[1]) if head else 0
    try:
        table = json.loads(data[head.end() : begin]) if head else None
    except ValueError:
        table = None
    if not isinstance(table, list) or len(table) > _MAX_FILES:
        raise IntegrityError("this is not a pack")
    sizes: dict[str, int] = {}
    for row in table:
        match row:
            case [str(path), int(size)] if is_packed_path(path) and type(size) is int and size >= 0:
                sizes[path] = size
            case _:
                raise IntegrityError(f"a pack must not hold {row!r:.200}")
    if len(sizes) != len(table) or begin + sum(sizes.values()) != len(data):
        raise IntegrityError("the files of the pack do not fill it")
    for path, size in sizes.items():
        yield path, memoryview(data)[begin : begin + size]
        begin += size
