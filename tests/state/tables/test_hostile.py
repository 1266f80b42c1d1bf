"""Files and trees of a table that nobody has written: an error of ours, before anything is made of them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.saved_kinds import check_group
from ckpt_tasks.format.tree import TensorRef
from ckpt_tasks.state.tables.table_rows import TableRows, read_rows, write_rows

SLOTS = ("sum",)
TREE: dict[str, Any] = {
    "dim": 2,
    "rule": "Adagrad",
    "slots": ["sum"],
    "options": {"lr": 0.1},
    "seed": 0,
    "spread": 0.5,
    "updates": 3,
    "count": 4,
    "shards": 1,
    "files": [TensorRef("users/0")],
}


def written(count: int = 3) -> memoryview:
    values = np.arange(2 * count, dtype=np.float32).reshape(count, 2)
    rows = TableRows(np.arange(count), (values, values + 1), np.arange(count), np.arange(count) % 2 == 1)
    return write_rows(rows, SLOTS)


def test_a_file_is_read_as_it_was_written() -> None:
    """Ids, rows, slots, steps and deletions come back, of no row as well; pyarrow reads the same."""
    for count in (0, 1, 3, 70):
        read, table = read_rows(written(count), 2, SLOTS, "users/0"), pa.ipc.open_file(written(count)).read_all()
        table.validate(full=True)
        assert read.ids.tolist() == table.column("id").to_pylist() == [*range(count)]
        assert read.deleted.tolist() == table.column("deleted").to_pylist() == [n % 2 == 1 for n in range(count)]
        assert read.values[1].tolist() == table.column("sum").to_pylist()


def test_no_byte_of_a_file_can_do_more_than_raise() -> None:
    """Each byte that is changed gives other rows or IntegrityError, and so does each end that is cut off."""
    good = bytes(written())
    for at in range(len(good)):
        for value in (0, 0x7F, 0xFF, good[at] ^ 1):
            _try(good[:at] + bytes([value]) + good[at + 1 :])
        _try(good[:at])


def _try(data: bytes) -> None:
    with suppress(IntegrityError):
        rows = read_rows(memoryview(bytearray(data)), 2, SLOTS, "users/0")
        assert {len(rows.steps), len(rows.deleted), *map(len, rows.values)} == {len(rows.ids)}


@pytest.mark.parametrize("other", [(3, SLOTS), (2, ()), (2, ("other",))])
def test_a_file_of_another_table_is_refused(other: tuple[int, tuple[str, ...]]) -> None:
    """A file whose rows have another length, or that has other slots, is damage."""
    with pytest.raises(IntegrityError, match="malformed"):
        read_rows(written(), *other, "users/0")


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name in TREE for value in (None, "x", -1, [1])),
        {"options": {"lr": "fast"}},
        {"files": []},
        {"files": [TensorRef("users/x")]},
    ],
    ids=str,
)
def test_a_tree_that_no_table_has_is_refused(change: dict[str, Any]) -> None:
    """Each field of another kind than the format says is damage, before a table or a file is looked at."""
    check_group("users", "table", TREE)
    if change in ({"rule": "x"}, {"spread": -1}):
        return  # a text and a number: the comparison with the table, and arithmetic, say what they are
    with pytest.raises(IntegrityError):
        check_group("users", "table", TREE | change)
    for name in TREE:
        with pytest.raises(IntegrityError):
            check_group("users", "table", {key: value for key, value in TREE.items() if key != name})
