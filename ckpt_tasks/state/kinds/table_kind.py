"""Lookup tables as groups: captured as files of rows, most of which storage already has; restored by a swap of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.format.keys import key_of_rank
from ckpt_tasks.format.layout.table_rows import Ids, TableRows, read_rows
from ckpt_tasks.format.tree import TensorRef
from ckpt_tasks.state.kinds.differences import Differences
from ckpt_tasks.state.kinds.group_parts import Guard, TableCapture
from ckpt_tasks.state.tables.rows import RowStore
from ckpt_tasks.state.tables.sharding import owners
from ckpt_tasks.state.tables.table import LookupTable, replace_all, table_settings
from ckpt_tasks.state.tables.table_files import Chain, TableFile, merged
from ckpt_tasks.state.tensors.tensor_sources import Maker
from ckpt_tasks.state.tensors.tensors import TensorSet

_MUST_FIT = ("dim", "rule", "slots")


def capture_table(table: LookupTable, group: str, tensors: TensorSet, parent: str | None) -> dict[str, Any]:
    """Return a table's tree, which refers to each file of its chain; `parent`: the checkpoint that the save follows.

    Raises UnsupportedStateError if the table has another rank or number of ranks than the save.
    """
    world = tensors.world
    if world is not None and (world.rank, world.size) != (table.shards.rank, table.shards.size):
        here = f"rank {table.shards.rank} of {table.shards.size}"
        hint = "Make the table and the Checkpointer after init_process_group, with one process group."
        raise UnsupportedStateError(f"the table is {here}, and is saved by {world}", key=group, hint=hint)
    captured = TableCapture(group, table, table.chain.following(table.store, parent))
    tensors.tables.append(captured)
    keys = [f"{group}/{file.number}" for file in captured.chain.files]
    if world is not None and world.size > 1:
        keys = [key_of_rank(key, world.rank) for key in keys]
    return table_settings(table) | {"files": [*map(TensorRef, keys)]}


class TablePart:
    """Restores one lookup table from the trees of the ranks that saved it.

    `home`: the identity of the checkpoint if it is committed; the next save then continues its files.
    """

    guard: Guard | None = None

    def __init__(self, table: LookupTable, name: str, trees: Sequence[Mapping[str, Any]], home: str | None):
        self._table = table
        self._name = name
        self._trees = trees
        self._home = home
        self._store = table.store
        self._chain = table.chain

    def compare(self, differences: Differences) -> None:
        """Record a difference in row length or update rule; note options that differ."""
        here = table_settings(self._table)
        for there, what in ((tree, what) for tree in self._trees for what in _MUST_FIT):
            if here[what] != there[what]:
                differences.differ(self._name, f"{what} {here[what]} here, {there[what]} in the checkpoint")
        for what, value in self._trees[0]["options"].items():
            if (now := here["options"].get(what, value)) != value:
                differences.replaced.append(f"{self._name}/{what}: {value} → {now}")

    def prepare(self, make: Maker) -> None:
        """Read the verified files, and build new rows; the live table does not change.

        Raises IntegrityError if a file is not a file of a table.
        """
        shards, parts = self._table.shards, list[TableRows]()

        def is_own(ids: Ids) -> Any:
            return owners(ids, shards.size) == shards.rank

        counts: list[int] = []
        for tree in self._trees:
            files = []
            for ref in tree["files"]:
                data = make.source.read(ref.key)
                if (data.dtype, data.dim()) != (torch.uint8, 1):
                    raise IntegrityError("a table's file is a tensor of bytes", key=ref.key)
                files.append(read_rows(data.numpy().data, tree["dim"], tree["slots"], ref.key))
            counts = [len(file.ids) for file in files]
            parts += merged(files, is_own)
        self._store = RowStore.of(parts, self._table.dim, len(self._table.rule.slots))
        goes_on = self._home is not None and len(self._trees) == 1 and self._trees[0]["shards"] == shards.size
        numbers = [int(ref.key.rpartition("/")[2]) for ref in self._trees[0]["files"]]
        files_here = zip(numbers, counts, strict=True) if goes_on else ()
        self._chain = Chain([TableFile(number, count, [str(self._home)]) for number, count in files_here])

    def write(self) -> None:
        """Replace the table's rows by the new rows."""
        replace_all(self._table, self._trees[0], self._store, self._chain)
