"""Lookup tables as groups: captured as files of rows, most of which storage already has; restored by a swap of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.format.keys import group_file_name
from ckpt_tasks.format.tree import TensorRef
from ckpt_tasks.state.kinds.differences import Differences
from ckpt_tasks.state.kinds.group_parts import GroupFile, GroupKind, Guard
from ckpt_tasks.state.kinds.names import Scope
from ckpt_tasks.state.tables.rows import RowStore
from ckpt_tasks.state.tables.sharding import owners
from ckpt_tasks.state.tables.table import LookupTable, replace_all, table_settings
from ckpt_tasks.state.tables.table_files import Chain, TableFile, merged
from ckpt_tasks.state.tables.table_rows import Ids, TableRows, read_rows
from ckpt_tasks.state.tensors.tensor_sources import Maker
from ckpt_tasks.state.tensors.tensors import RankRule, TensorSet

_MUST_FIT = ("dim", "rule", "slots")


class TableCapture(NamedTuple):
    """A captured table, or another `owner` of a chain of files; `copy` copies the rows of the last file if it is new.

    `bytes` returns all rows, alike for equal rows.
    """

    group: str
    owner: Any
    chain: Chain
    rank: int
    ranks: int
    copy: Callable[[], None]
    bytes: Callable[[], bytes]

    def take(self) -> list[GroupFile]:
        """Copy the changed rows into the new file, and list all files; the next save continues this chain."""
        self.copy()
        self.owner.chain = self.chain
        return [
            GroupFile(
                self.group,
                group_file_name(self.group, self.rank, self.ranks, file.number),
                self._key(file),
                file.contents,
                file.committed,
            )
            for file in self.chain.files
        ]

    @property
    def refs(self) -> list[TensorRef]:
        """The references of the tree to the files."""
        return [TensorRef(f"{self.group}/{self._key(file)}") for file in self.chain.files]

    def _key(self, file: TableFile) -> str:
        return f"{self.rank:05d}/{file.number}" if self.ranks > 1 else f"{file.number}"


def read_file(make: Maker, ref: TensorRef) -> tuple[int, memoryview]:
    """Return the number and the verified bytes of a file; raise IntegrityError if it is not a file of rows."""
    data = make.source.read(ref.key)
    if (data.dtype, data.dim()) != (torch.uint8, 1):
        raise IntegrityError("a file of rows is a tensor of bytes", key=ref.key)
    return int(ref.key.rpartition("/")[2]), data.numpy().data


def _capture(table: LookupTable, group: str, scope: Scope, tensors: TensorSet, draws: bool) -> dict[str, Any]:
    """Return a table's tree, which refers to each file of its chain.

    Raises UnsupportedStateError if the table has another rank or number of ranks than the save.
    """
    world = tensors.world
    if world is not None and (world.rank, world.size) != (table.shards.rank, table.shards.size):
        here = f"rank {table.shards.rank} of {table.shards.size}"
        hint = "Make the table and the Checkpointer after init_process_group, with one process group."
        raise UnsupportedStateError(f"the table is {here}, and is saved by {world}", key=group, hint=hint)
    chain, store, shards = table.chain.following(table.store, scope.home), table.store, table.shards
    copy = partial(chain.take, store, table.rule.slots)
    captured = TableCapture(group, table, chain, shards.rank, shards.size, copy, store.bytes_by_id)
    tensors.files.append(captured)
    return table_settings(table) | {"files": captured.refs}


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

        counts: list[tuple[int, int]] = []
        for tree in self._trees:
            counts, files = [], []
            for ref in tree["files"]:
                number, data = read_file(make, ref)
                files.append(read_rows(data, tree["dim"], tree["slots"], ref.key))
                counts.append((number, len(files[-1].ids)))
            parts += merged(files, is_own)
        self._store = RowStore.of(parts, self._table.dim, len(self._table.rule.slots))
        goes_on = self._home is not None and len(self._trees) == 1 and self._trees[0]["shards"] == shards.size
        self._chain = Chain([TableFile(*one, [str(self._home)]) for one in counts] if goes_on else ())

    def write(self) -> None:
        """Replace the table's rows by the new rows."""
        replace_all(self._table, self._trees[0], self._store, self._chain)


TABLE = GroupKind(
    LookupTable,
    _capture,
    lambda v, name, trees, at, copies, kept: TablePart(v, name, trees, at.home),
    RankRule.BY_RANK,
    resizes=True,
    gathers=True,
    moving=lambda table: table.updates,
)
