"""The differences between a state and a checkpoint, and what the user can do; finds renamed modules by shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt_tasks.errors import StateMismatchError
from ckpt_tasks.format.tree import TensorRef
from ckpt_tasks.state.tensors.tensor_sources import Stored
from ckpt_tasks.state.tensors.tensors import difference

_STRICT_HINT = (
    "Make the objects as they were when it was saved; to take only a part of it, as for fine-tuning, "
    "restore(state, only=[…], missing='keep')"
)
_LOOSE_HINT = "Name what is not to be taken in leave=[…]; with missing='keep' what the checkpoint lacks keeps its value"

_DTYPE_HINT = "Make the model as it was saved, restore, and convert it after that: model.to({})"


@dataclass
class Differences:
    """Collects the differences between a checkpoint and a state; `stored`: dtype and shape of each stored tensor."""

    stored: Stored
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    hint: str | None = None
    loose: bool = False
    of_ranks: int | None = None  # Only so many ranks can restore the checkpoint.
    groups: tuple[str, ...] = ()  # The groups that are restored.
    missing_tensors: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # By name.
    # The state's dtypes of tensors that differ from the checkpoint only in the dtype.
    other_dtypes: list[torch.dtype] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)

    def names(self, group: str, here: set[str], there: set[str]) -> None:
        """Compare names: a name only in the state (`here`) is missing, a name only in the checkpoint is unexpected."""
        self.missing += sorted(f"{group}/{name}" for name in here - there)
        self.unexpected += sorted(f"{group}/{name}" for name in there - here)

    def differ(self, place: str, why: str) -> None:
        """Record that the value at a place in the state differs, and why."""
        self.different.append(f"{place} ({why})")

    def tensor(self, place: str, live: torch.Tensor, ref: Any) -> None:
        """Compare a live tensor with the checkpoint's tensor at its place."""
        if type(ref) is not TensorRef:
            self.differ(place, "a tensor here, another value in the checkpoint")
        elif why := difference(live, *self.stored[ref.key]):
            self.other_dtypes += [live.dtype] if tuple(live.shape) == tuple(self.stored[ref.key][1]) else []
            self.differ(place, why)

    def replace(self, place: str, here: object, there: object) -> None:
        """Record a setting of the program that the restore will replace with the checkpoint's value."""
        self.change(place, there, here, f"{there!r} is restored.")

    def change(self, name: str, was: object, now: object, effect: str) -> None:
        """Record that a value differs from the checkpoint's, with a sentence on the `effect`."""
        self.replaced.append(f"{name}: {was!r} → {now!r}. {effect}")

    def raise_any(self) -> None:
        """Raise StateMismatchError with all recorded differences; do nothing without differences."""
        if self.missing or self.unexpected or self.different:
            error = StateMismatchError(
                "the checkpoint does not fit the state; nothing was changed",
                missing=tuple(self.missing),
                unexpected=tuple(self.unexpected),
                different=tuple(self.different),
                hint=self.hint or (_LOOSE_HINT if self.loose else self._what_to_do()),
            )
            error.of_ranks = self.of_ranks
            raise error

    def _renamed(self) -> dict[str, str]:
        return renamed_places(self.missing_tensors, self.missing, self.unexpected, self.stored, self.groups)

    def _what_to_do(self) -> str:
        if len(self.other_dtypes) == len(self.different) > 0 and not self.missing and not self.unexpected:
            return _DTYPE_HINT.format(self.other_dtypes[0])
        renamed = {} if self.different else self._renamed()
        return f"If it was only renamed: restore(state, only={renamed})" if renamed else _STRICT_HINT


Described = tuple[str, tuple[int, ...]]  # Dtype and shape.
_MOST = 4


def renamed_places(
    here: Mapping[str, Described],
    missing: Sequence[str],
    unexpected: Sequence[str],
    stored: Mapping[str, Described],
    groups: Sequence[str],
) -> dict[str, str]:
    """Return the argument for `restore(state, only=…)` if parts of modules were merely renamed, else {}.

    `here` has the tensors of the state's modules that the checkpoint lacks; `groups` are all groups of the restore. The
    unmatched tensors of both sides must fit one to one, by shape, dtype and last part of the name.
    """
    pairs: dict[str, str] = {}
    left = [name for name in unexpected if name in stored]
    for name, described in here.items():
        fits = [key for key in left if stored[key] == described and _last(key) == _last(name)]
        if len(fits) != 1:
            return {}
        left.remove(fits[0])
        pairs |= dict([_prefixes(name, fits[0])])
    rest = [name for name in missing if name not in here]
    optimizers = {name.partition("/")[0] for name in rest}
    of_parameters = all(name.partition("/")[2] in here for name in rest)
    if left or not pairs or len(pairs) > _MOST or not of_parameters:
        return {}
    parts = {f"{key}/{new}": f"{key}/{old}" for key in sorted(optimizers) for new, old in pairs.items()}
    return {**pairs, **parts, **{name: name for name in groups}}


def _prefixes(new: str, old: str) -> tuple[str, str]:
    """Remove the common end of two names: model/top.weight and model/head.weight become model/top and model/head."""
    while "." in new and "." in old and _last(new) == _last(old):
        new, old = new.rpartition(".")[0], old.rpartition(".")[0]
    return new, old


def _last(name: str) -> str:
    return name.rpartition(".")[2]
