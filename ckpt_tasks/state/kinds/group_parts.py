"""What a kind of group is, the data of captured groups, and the interface for the restore of one group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ckpt_tasks.state.kinds.differences import Differences
from ckpt_tasks.state.kinds.names import Scope
from ckpt_tasks.state.tensors.copies import Copies
from ckpt_tasks.state.tensors.packing import pack, unpack
from ckpt_tasks.state.tensors.tensor_sources import HeldTensors, Maker
from ckpt_tasks.state.tensors.tensors import RankRule, TensorSet


@dataclass
class KeptJson:
    """The JSON of those parts of a tree, by their names, that stay the same from capture to capture."""

    names: Sequence[str]
    json: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupState:
    """One group: its `kind` (module, optimizer, stateful, generator, plain or rng) and its `tree` (format/tree.py).

    `by_rank`: each of many ranks has its own tree. `buffers` names tensors of which each rank has its own.
    """

    kind: str
    tree: Any
    by_rank: bool = False
    buffers: tuple[str, ...] = ()
    kept: KeptJson | None = field(default=None, compare=False)

    @property
    def trees(self) -> list[Any]:
        """The ranks' trees that this process has: only its own."""
        return [self.tree]


class Contents(Protocol):
    """What a file holds; its bytes may be made at their first use, in the background."""

    @property
    def bytes(self) -> memoryview: ...


class GroupFile(NamedTuple):
    """A file that a group writes by itself: name, key, and contents; None if a committed checkpoint has the contents.

    `committed` gets the identity of a checkpoint that has the file.
    """

    group: str
    name: str
    key: str
    contents: Contents | None
    committed: Callable[[str], None]


class GroupFiles(Protocol):
    """A captured group that writes files by itself."""

    @property
    def group(self) -> str: ...

    def take(self) -> list[GroupFile]:
        """Copy what the new file needs, and list all files of the group; its next save continues them."""

    def bytes(self) -> bytes:
        """Return the whole value, alike for equal values."""


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
    files: Sequence[GroupFiles] = ()
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


class GroupKind(NamedTuple):
    """A kind of group.

    `has`: the class of the values, or a function that knows them. `capture(value, name, scope, tensors, draws)` returns
    the tree; `part(value, name, tree, scope, copies, kept)` restores the tree, except the names in `kept`. `rule` says
    how plain tensors differ between ranks. `draws(value)`: reading the state runs foreign code, which may draw random
    numbers. `resizes`: another number of ranks can restore the ranks' trees. `gathers`: each rank needs all of these
    trees, and `part` gets a list of them. `moving(value)` changes with training: a loop's variables are searched for
    values of the class, which belong into the state.
    """

    has: type | Callable[[Any], bool]
    capture: Callable[[Any, str, Scope, TensorSet, bool], Any]
    part: Callable[[Any, str, Any, Scope, Copies, frozenset[str]], RestorePart]
    rule: RankRule
    draws: Callable[[Any], bool] = lambda value: False
    resizes: bool = False
    gathers: bool = False
    moving: Callable[[Any], object] | None = None


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
