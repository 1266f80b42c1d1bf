"""A pack: the same files give the same bytes, and no table leads out of the directory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.pack import is_packed_path, pack_files, unpack_files

_PATHS = st.from_regex(r"[a-z0-9_]{1,8}(/[a-z0-9_.]{0,3}[a-z0-9]){0,3}", fullmatch=True).filter(is_packed_path)


@given(st.dictionaries(_PATHS, st.binary(max_size=64), max_size=6))
def test_files_come_back_and_their_order_does_not_count(files: dict[str, bytes]) -> None:
    """What was packed is unpacked, and the same files in another order are the same bytes."""
    packed = b"".join(pack_files(files))
    assert {path: bytes(content) for path, content in unpack_files(packed)} == files
    assert b"".join(pack_files(dict(reversed(files.items())))) == packed


@pytest.mark.parametrize(
    "path", ["../a", "/a", "a/../b", "a//b", ".a", "a/.b", "", "a/", "a\0", "a\\b", "é", "a" * 256, "a/" * 16 + "a"]
)
def test_a_path_leads_nowhere_else(path: str) -> None:
    """A table with a path out of the directory, or to a hidden file, is refused before any file is handed out."""
    with pytest.raises(IntegrityError):
        pack_files({path: b"x"})
    with pytest.raises(IntegrityError, match="must not hold"):
        next(unpack_files(_packed([["a", 0], [path, 1]], b"x")))


TABLES = [b'[["a",1]]', b'[["a",-1]]', b'[["a",true]]x', b'[["a",0],["a",0]]', b'["a"]', b'[["a",1.0]]x']
OTHERS = [b"", b"ckpt-pack 2 2\n[]", b"ckpt-pack 1 9\n[]", b"ckpt-pack 1 2\n{}", b"ckpt-pack 1 2\n[]x"]


@pytest.mark.parametrize("data", [*OTHERS, *(b"ckpt-pack 1 %d\n%s" % (len(table), table) for table in TABLES)])
def test_anything_else_is_not_a_pack(data: bytes) -> None:
    """A table that does not fill the pack, names a path twice, or has another shape is an IntegrityError."""
    with pytest.raises(IntegrityError):
        list(unpack_files(data))


def _packed(table: Any, content: bytes) -> bytes:
    rows = json.dumps(table).encode()
    return b"ckpt-pack 1 %d\n" % len(rows) + rows + content
