"""The interfaces of a restore: the source of its tensors, and the part that restores one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ckpt_tasks.errors import IntegrityError, StateMismatchError
from ckpt_tasks.format.tree import TensorRef, tensor_refs
from ckpt_tasks.state.placements import is_sharded, like, local_of
from ckpt_tasks.state.renames import renamed_places
from ckpt_tasks.state.tensors import TensorSet, allocate, copy_all, difference
from ckpt_tasks.state.values import pack, unpack

__all__ = [
    "Captured",
    "Differences",
    "GroupState",
    "HeldTensors",
    "RestorePart",
    "Rollback",
    "Saved",
    "Stored",
    "TensorSource",
    "needed_keys",
]


class TensorSource(Protocol):
    """The tensors of one checkpoint by full key.

    `fetch` fills new tensors and verifies everything else. Until then nothing of the target may change; after it `copy`
    can fail only by hardware.
    """

    def like(self, key: str) -> torch.Tensor:
        """Return a tensor without values (on the meta device) of the stored dtype and shape."""

    def read(self, key: str) -> torch.Tensor:
        """Return the verified values at once, on the CPU; the caller must not change them."""

    def fill(self, into: torch.Tensor, key: str) -> None:
        """Request that a new tensor, which the program cannot see yet, is filled by `fetch`."""

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, str]] = ()) -> None:
        """Fill the requested tensors and verify all others; raise IntegrityError or StoreError. `copy` gets `pairs`."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, str]]) -> None:
        """Copy into live tensors of the stored shapes, on any device."""


class HeldTensors:
    """Tensors in memory that are known to be good."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors

    def like(self, key: str) -> torch.Tensor:
        return torch.empty_like(self._tensors[key], device="meta")

    def read(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def fill(self, into: torch.Tensor, key: str) -> None:
        self.copy([(into, key)])

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, str]] = ()) -> None:
        """Do nothing: all tensors are in memory."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, str]]) -> None:
        copy_all([(local_of(live), local_of(self._tensors[key])) for live, key in pairs])


_STRICT_HINT = (
    "Make the objects as they were when it was saved; to take only a part of it, as for fine-tuning, "
    "restore(state, only=[…], missing='keep')"
)
_LOOSE_HINT = "Name what is not to be taken in leave=[…]; with missing='keep' what the checkpoint lacks keeps its value"

_DTYPE_HINT = "Make the model as it was saved, restore, and convert it after that: model.to({})"

Stored = Mapping[str, tuple[str, tuple[int, ...]]]  # full key → torch's name of the dtype, shape


@dataclass(frozen=True)
class GroupState:
    """One group: its `kind` (module, optimizer, stateful, generator, plain or rng) and its `tree` (format/tree.py).

    `by_rank`: each of many ranks has a tree of its own. `buffers` names tensors of which each rank has its own.
    """

    kind: str
    tree: Any
    by_rank: bool = False
    buffers: tuple[str, ...] = ()


class Saved(Protocol):
    """One group of a checkpoint; `tree` may be decoded on access, and raises IntegrityError if it is malformed."""

    @property
    def kind(self) -> str: ...
    @property
    def tree(self) -> Any: ...
    @property
    def by_rank(self) -> bool: ...


@dataclass(frozen=True)
class Captured:
    """A captured state: the trees of its groups, and its live tensors by full key, detached and not copied.

    `frozen` are the keys of parameters without gradient: they are in separate files, which need not be written again.
    `places` has, for each tensor that is a part of a sharded one, the shape of the whole and the offset in it.
    `replicated` has the parameters and optimizer states that several ranks hold: this rank's part, and its offset.
    `one_for_all` has the plain tensors of other values, also in the ranks that do not write them.
    """

    groups: dict[str, GroupState]
    tensors: dict[str, torch.Tensor]
    frozen: frozenset[str] = frozenset()
    places: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    replicated: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]] = field(default_factory=dict)
    one_for_all: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Differences:
    """Collect the differences of a checkpoint and a target; `stored` has dtype and shape of every stored tensor."""

    stored: Stored
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    hint: str | None = None
    loose: bool = False
    groups: tuple[str, ...] = ()  # the groups that are restored
    missing_tensors: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # dtype and shape of each
    other_dtypes: list[torch.dtype] = field(default_factory=list)  # here, of those that differ in nothing else
    replaced: list[str] = field(default_factory=list)

    def names(self, group: str, here: set[str], there: set[str]) -> None:
        """Compare names: those only in the target are missing, those only in the checkpoint unexpected."""
        self.missing += sorted(f"{group}/{name}" for name in here - there)
        self.unexpected += sorted(f"{group}/{name}" for name in there - here)

    def differ(self, place: str, why: str) -> None:
        """Note that a place differs, and how."""
        self.different.append(f"{place} ({why})")

    def tensor(self, place: str, live: torch.Tensor, ref: Any) -> None:
        """Compare a live tensor with the checkpoint's value at its place."""
        if type(ref) is not TensorRef:
            self.differ(place, "a tensor here, another value in the checkpoint")
        elif why := difference(live, *self.stored[ref.key]):
            self.other_dtypes += [live.dtype] if tuple(live.shape) == tuple(self.stored[ref.key][1]) else []
            self.differ(place, why)

    def replace(self, place: str, here: object, there: object) -> None:
        """Note a setting of the program that the restore replaces by another value."""
        self.change(place, there, here, f"{there!r} is restored.")

    def change(self, name: str, was: object, now: object, effect: str) -> None:
        """Note a value that differs from that of the checkpoint, and what this does, in a sentence."""
        self.replaced.append(f"{name}: {was!r} → {now!r}. {effect}")

    def raise_any(self) -> None:
        """Raise StateMismatchError with everything noted, if anything was."""
        if self.missing or self.unexpected or self.different:
            raise StateMismatchError(
                "the checkpoint does not fit the state; nothing was changed",
                missing=tuple(self.missing),
                unexpected=tuple(self.unexpected),
                different=tuple(self.different),
                hint=self.hint or (_LOOSE_HINT if self.loose else self._what_to_do()),
            )

    def _renamed(self) -> dict[str, str]:
        return renamed_places(self.missing_tensors, self.missing, self.unexpected, self.stored, self.groups)

    def _what_to_do(self) -> str:
        if len(self.other_dtypes) == len(self.different) > 0 and not self.missing and not self.unexpected:
            return _DTYPE_HINT.format(self.other_dtypes[0])
        renamed = {} if self.different else self._renamed()
        return f"If it was only renamed: restore(state, only={renamed})" if renamed else _STRICT_HINT


class RestorePart(Protocol):
    """The restore of one group.

    `compare` notes every difference, before a tensor is read. `prepare` makes new values, which `fetch` of the maker's
    source fills, and changes nothing; all parts share the maker. `write` changes the target. A part that runs the
    user's code has a `guard`, which undoes it if it raises.
    """

    guard: Rollback | None

    def compare(self, differences: Differences) -> None: ...
    def prepare(self, make: Maker) -> None: ...
    def write(self) -> None: ...


class Rollback:
    """Keep a copy of the state of an object whose load_state_dict may raise half-way."""

    def __init__(self, target: Any, group: str, state: Any):
        self._target = target
        self._live = TensorSet(None)
        self._state = state
        self._tree = pack(state, group, self._live)
        self._kept: dict[str, torch.Tensor] = {}

    def keep(self) -> None:
        """Copy the tensors of the old state."""
        with torch.no_grad():
            self._kept = {key: tensor.clone() for key, tensor in self._live.tensors.items()}

    def undo(self) -> None:
        """Restore the object's old state."""
        self._target.load_state_dict(unpack(self._tree, Maker(HeldTensors(self._kept)), self._state))


class Maker:
    """Make new tensors and arrays for refs. Equal refs get the same tensor, so that ties are restored."""

    def __init__(self, source: TensorSource):
        self.source = source
        self._made: dict[tuple[TensorRef, torch.device], torch.Tensor] = {}

    def __call__(
        self,
        ref: TensorRef,
        live: Any,
        *,
        device: torch.device | None = None,
        model: torch.Tensor | None = None,
        now: bool = False,
    ) -> Any:
        """Make a tensor: on `device`, else on the device of the live tensor at its place, else on the CPU.

        If a DTensor is at its place, or `model` is a DTensor of its shape, make a DTensor with the same placements.
        With `now` return a copy with its values, on the CPU.
        """
        if now:
            values = self.source.read(ref.key).clone()
            return values.numpy() if ref.array else values
        model = live if is_sharded(live) else model
        if model is not None and is_sharded(model) and model.shape == self.source.like(ref.key).shape:
            return self._sharded(ref, model)
        if device is None or ref.array:
            device = live.device if isinstance(live, torch.Tensor) and not ref.array else torch.device("cpu")
        plain = TensorRef(ref.key, stride=ref.stride, requires_grad=ref.requires_grad)  # an array may share its memory
        if (plain, device) not in self._made:
            self._made[plain, device] = allocate(self.source.like(ref.key), plain, device)
            self.source.fill(self._made[plain, device], ref.key)
        made = self._made[plain, device]
        return made.numpy() if ref.array else made

    def _sharded(self, ref: TensorRef, model: torch.Tensor) -> torch.Tensor:
        local = local_of(model)
        if (ref, local.device) not in self._made:
            dtype = self.source.like(ref.key).dtype
            made = like(torch.empty(local.shape, dtype=dtype, device=local.device), model)
            self.source.fill(made, ref.key)
            self._made[ref, local.device] = made
        return self._made[ref, local.device]


def needed_keys(group: str, tree: Any, stored: Stored) -> set[str]:
    """Return the keys of a tree's tensors; raise IntegrityError if one is not among the stored ones."""
    keys = {ref.key for ref in tensor_refs(tree)}
    if not keys <= stored.keys():
        raise IntegrityError(
            f"group {group} names a tensor that is not in the checkpoint", key=min(keys - stored.keys())
        )
    return keys
