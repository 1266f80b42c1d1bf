"""Data of captured groups, and the interface for the restore of one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ckpt_tasks.format.keys import table_name
from ckpt_tasks.state.kinds.differences import Differences
from ckpt_tasks.state.tables.table import LookupTable
from ckpt_tasks.state.tables.table_files import Chain, FileBytes, TableFile
from ckpt_tasks.state.tensors.packing import pack, unpack
from ckpt_tasks.state.tensors.tensor_sources import HeldTensors, Maker
from ckpt_tasks.state.tensors.tensors import TensorSet


@dataclass(frozen=True)
class GroupState:
    """One group: its `kind` (module, optimizer, stateful, generator, plain or rng) and its `tree` (format/tree.py).

    `by_rank`: each of many ranks has its own tree. `buffers` names tensors of which each rank has its own.
    """

    kind: str
    tree: Any
    by_rank: bool = False
    buffers: tuple[str, ...] = ()

    @property
    def trees(self) -> list[Any]:
        """The ranks' trees that this process has: only its own."""
        return [self.tree]


class TableFileCapture(NamedTuple):
    """A file of a captured lookup table: name, key, and contents; None if a commit already has the contents."""

    group: str
    name: str
    key: str
    file: TableFile
    contents: FileBytes | None


class TableCapture(NamedTuple):
    """A captured lookup table and its files; the last file gets its rows in `take`."""

    group: str
    table: LookupTable
    chain: Chain

    def take(self) -> list[TableFileCapture]:
        """Copy the changed rows into the new file, and list all files; the next save continues this chain."""
        self.chain.take(self.table.store, self.table.rule.slots)
        self.table.chain = self.chain
        shards = self.table.shards
        of_rank = f"{shards.rank:05d}/" if shards.size > 1 else ""
        return [
            TableFileCapture(
                self.group,
                table_name(self.group, shards.rank, shards.size, file.number),
                f"{of_rank}{file.number}",
                file,
                file.contents,
            )
            for file in self.chain.files
        ]


class Saved(Protocol):
    """One group of a checkpoint; reading `tree` may decode it, and raises IntegrityError if it is malformed."""

    @property
    def kind(self) -> str: ...
    @property
    def tree(self) -> Any: ...
    @property
    def trees(self) -> Sequence[Any]: ...
    @property
    def by_rank(self) -> bool: ...


@dataclass(frozen=True)
class Captured:
    """A captured state: the trees of its groups, and its live tensors by full key, detached but not copied.

    `frozen` are the keys of parameters without gradient: they go into separate files, which later saves reuse. `places`
    has, for each part of a sharded tensor, the shape of the whole tensor and the part's offset. `replicated` has the
    parameters and optimizer states that several ranks hold: this rank's part, and its offset. `one_for_all` has all
    other plain tensors, which one rank writes for all. `constant` are keys of tensors whose values do not change while
    a reference to them exists.
    """

    groups: dict[str, GroupState]
    tensors: dict[str, torch.Tensor]
    frozen: frozenset[str] = frozenset()
    places: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    replicated: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]] = field(default_factory=dict)
    one_for_all: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tables: Sequence[TableCapture] = ()
    constant: AbstractSet[str] = frozenset()


class RestorePart(Protocol):
    """Restores one group.

    `compare` records every difference before a tensor is read. `prepare` does not change the live object: it makes new
    values, which `fetch` of the maker's source fills; all groups share the maker. `write` changes the live object. If
    `write` runs the user's code, `guard` undoes the changes of code that raises.
    """

    guard: Guard | None

    def compare(self, differences: Differences) -> None: ...
    def prepare(self, make: Maker) -> None: ...
    def write(self) -> None: ...


class Guard:
    """Keeps a copy of an object's state, because the object's load_state_dict may raise half-way.

    `foreign`: a part of the load_state_dict is neither torch's nor ours, so a second one may not undo the first.
    """

    def __init__(self, target: Any, group: str, state: Any, *, foreign: bool = True):
        self.foreign = foreign
        self._target = target
        self._live = TensorSet(None)
        self._state = state
        self._tree = pack(state, group, self._live)
        self._kept: dict[str, torch.Tensor] = {}

    def keep(self) -> None:
        """Copy the tensors of the object's old state."""
        with torch.no_grad():
            self._kept = {key: tensor.clone() for key, tensor in self._live.tensors.items()}

    def undo(self) -> None:
        """Restore the object's old state."""
        self._target.load_state_dict(unpack(self._tree, Maker(HeldTensors(self._kept)), self._state))
