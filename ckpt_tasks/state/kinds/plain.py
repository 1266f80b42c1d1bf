"""Plain values as groups: restored, if possible, into the objects that the program already has.

A dict, list, set or deque stays the same object and gets new contents. A tensor or an array keeps its memory. Three
kinds of tensor must have the stored shape and dtype: a tensor that requires a gradient (an optimizer holds it), a
tensor that belongs to a live module or optimizer, and a group that is a tensor in a read-only state. A restore replaces
any other tensor that does not fit. It assigns a number, a string or a tuple to its container. It also assigns a value
of another kind than the program's, and reports the change: other references to the program's value keep the old value.

`module.state_dict()` is a dict of the module's own tensors, so a restore into this dict restores the module. The
state_dict of an optimizer, schedule or scaler holds copies, and an optimizer makes its tensors only at the first step:
a restore into such a dict would not reach the object, so we refuse it.

We do not search for other references to a tensor: listing all live objects with the garbage collector makes `tuple(x
for x in …)` fail in every other thread, and takes half a second in a large process.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.format.tree import MAPPINGS, TensorRef, Typed, children, words
from ckpt_tasks.state.kinds.differences import Differences
from ckpt_tasks.state.kinds.group_parts import Guard
from ckpt_tasks.state.tensors.copies import Copies
from ckpt_tasks.state.tensors.packing import (
    REFILLED,
    array_view,
    finished,
    has_memory,
    in_place,
    inside,
    is_scalar,
    live_parts,
    pack,
    parts_of,
    rebuilt,
)
from ckpt_tasks.state.tensors.tensor_sources import Maker, Stored
from ckpt_tasks.state.tensors.tensors import DTYPES, TensorSet, difference, may_overlap

_OF_OPTIMIZERS = frozenset({"state", "param_groups"})
_OF_OTHERS = {
    "a learning-rate schedule": frozenset({"last_epoch", "_last_lr"}),
    "a GradScaler": frozenset({"scale", "_growth_tracker"}),
}


def belongs_to_another(value: Any) -> bool:
    """Return True if a tensor is a detached alias of another tensor, as in the `state_dict()` of a module."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
        return False
    if value._base is not None or value.untyped_storage().nbytes() != value.nbytes:
        return False  # A view is not an alias: its base holds the memory.
    return _uses(value) > _uses(torch.empty(1))


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def refuse_copies_of_state(value: Any, name: str) -> None:
    """Raise UnsupportedStateError if a plain value contains a `state_dict()` of copies, which no restore can use.

    Allows a program's own copy of an optimizer's state, whose tensors no live optimizer holds.
    """
    for what, keys in _OF_OTHERS.items():
        if type(value) in MAPPINGS and keys <= value.keys():
            _refuse(name, what)
    for path, one in _dicts(value, name):
        if _is_of_an_optimizer(one) and _is_live(one):
            _refuse(path, "an optimizer")
        if isinstance(one, OrderedDict) and hasattr(one, "_metadata"):
            extra = [key for key in one if str(key).endswith("_extra_state")]
            if extra:
                _refuse(f"{path}/{extra[0]}", "a module with an extra state")


def _refuse(path: str, what: str) -> None:
    raise UnsupportedStateError(
        f"this is the state_dict() of {what}, and a restore into it would not reach the object",
        key=path,
        hint="Give the object itself: state={'model': model, 'optimizer': optimizer}.",
    )


def _dicts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if type(value) in MAPPINGS:
        yield path, value
    for key, item in live_parts(value):
        if not is_scalar(item):
            yield from _dicts(item, f"{path}/{key}")


def _is_of_an_optimizer(value: Mapping[Any, Any]) -> bool:
    groups = value.get("param_groups") if value.keys() >= _OF_OPTIMIZERS else None
    return isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)


def _is_live(value: Mapping[Any, Any]) -> bool:
    """Return True if a live optimizer holds the entries of its state_dict, or if there are no entries yet."""
    entries = value["state"]
    return not entries or max(_references(entries)) > max(_references({0: {}}))


def _references(entries: Mapping[Any, Any]) -> list[int]:
    return [sys.getrefcount(entry) for entry in entries.values()]


_REPLACED = "The first is restored to its place in the state; another name for the second one keeps that."
_Place = tuple[Any, ...]  # The group's name, then keys and positions.


class PlainPart:
    """Restores one plain value of a state."""

    guard: Guard | None = None

    def __init__(self, state: MutableMapping[str, Any], name: str, tree: Any, copies: Copies, *, can_assign: bool):
        self._state = state
        self._can_assign = can_assign
        self._name = name
        self._tree = tree
        self._live = state[name]
        self._copies = copies
        self._kept: dict[
            _Place, torch.Tensor | None
        ] = {}  # Views of tensors and arrays that keep their memory; None: an array that torch cannot view.
        self._refills: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], Any]] = []
        self._value: Any = None
        self._stored: Stored = {}
        own = TensorSet()
        self._here = pack(self._live, name, own)  # Raise for a value that a save would refuse.
        self._shapes = {key: (DTYPES[tensor.dtype], tuple(tensor.shape)) for key, tensor in own.tensors.items()}
        refuse_copies_of_state(self._live, name)
        if not can_assign and not in_place(self._live):
            hint = "Give the state as a dict: a number or a string is restored by assigning it there."
            raise UnsupportedStateError("the state is read-only", key=name, hint=hint)

    def compare(self, differences: Differences) -> None:
        """Compare tensors that must fit: a group that is one tensor, and tensors that require a gradient."""
        top, self._stored = (self._name,), differences.stored
        self._note(self._tree, self._here, top, differences)
        strict = {place: live for place, live in _tensors(self._live, top) if self._must_fit(place, live)}
        if top in strict:
            self._compare_top(differences)
        for place, ref, _, _ in _refs(self._tree, self._live, top) if strict else ():
            live = strict.pop(place, None)
            if live is None:
                continue
            view = array_view(live) if isinstance(live, np.ndarray) else live
            if place != top:
                differences.tensor(_text(place), live, ref)
            if view is not None:
                self._copies.bind(view, ref.key)
            self._kept[place] = view
        differences.missing += [_text(place) for place in strict if place != top]

    def compare_rest(self, differences: Differences) -> None:
        """Compare the tensors and arrays that `compare` skips.

        Tensors and arrays that fit the stored values keep their memory; `prepare` makes new ones for the rest. Records
        a difference if a live object such as a module owns the memory, so that no new tensor can replace it.
        """
        top = (self._name,)
        rest = {place: live for place, live in _tensors(self._live, top) if not self._must_fit(place, live)}
        for place, ref, here, beside in _refs(self._tree, self._live, top):
            if place in self._kept:
                continue
            live = None if here is None else rest.get(place)
            if live is None:
                if beside and all(map(belongs_to_another, beside)):
                    differences.unexpected.append(_text(place))
            elif self._fits(place, live, ref, differences.stored):
                del rest[place]
            elif self._must_keep(live):
                del rest[place]
                if not ref.array and (why := difference(live, *differences.stored[ref.key])):
                    differences.differ(_text(place), why)
                else:
                    differences.differ(_text(place), "it belongs to a live object, and cannot be copied into")
        differences.missing += [_text(place) for place, live in rest.items() if self._must_keep(live)]

    def prepare(self, make: Maker) -> None:
        """Make new values, and request the copies."""
        tensor = partial(self._tensor, make)
        self._value = rebuilt(self._tree, self._live, tensor, self._finished, (self._name,))

    def write(self) -> None:
        """Refill containers and assign values, after the copies into tensors."""
        for array, values in self._arrays:
            np.copyto(array, values)
        for live, content in self._refills:
            _refill(live, content)
        if self._value is not self._live:
            self._state[self._name] = self._value

    def _compare_top(self, differences: Differences) -> None:
        live, ref = self._live, self._tree
        if isinstance(live, torch.Tensor):
            if type(ref) is TensorRef and ref.array:
                differences.differ(self._name, "a tensor here, an array in the checkpoint")
            else:
                differences.tensor(self._name, live, ref)
        elif type(ref) is not TensorRef or not ref.array:
            differences.differ(self._name, "an array here, another value in the checkpoint")
        elif not live.flags.writeable:
            differences.differ(self._name, "a read-only array here")
        elif why := difference(_shape_of(live), *differences.stored[ref.key]):
            differences.differ(self._name, why)

    def _must_fit(self, place: _Place, live: Any) -> bool:
        if isinstance(live, torch.Tensor) and live.requires_grad:
            return True
        ref = self._tree
        if len(place) > 1 or type(ref) is not TensorRef or ref.array == isinstance(live, torch.Tensor):
            return len(place) == 1
        fits = in_place(live) and difference(_shape_of(live), *self._stored[ref.key]) is None
        return fits or not self._can_assign

    def _note(self, there: Any, here: Any, place: _Place, differences: Differences) -> None:
        """Record stored values of another kind than the program's values; skip what one side lacks (None, {})."""
        kinds = {_kind(there), _kind(here)}
        waits = len(place) > 1 and kinds == {dict, OrderedDict} and not here  # For a state_dict(), which is ordered.
        if here is None or there is None or waits:
            return
        if len(kinds) > 1 or (len(place) == 1 and type(there) is TensorRef):
            was, now = words(there, self._stored), words(here, self._shapes)
            if was != now and not (kinds == {"number", "tensor"} and (was.endswith(" []") or now.endswith(" []"))):
                differences.replaced.append(f"{_text(place)}: {was} → {now}. {_REPLACED}")
            return
        own = dict(children(here))
        for key, part in children(there):
            if (key in own and type(part) is not type(own[key])) or not is_scalar(part):
                self._note(part, own.get(key), (*place, key), differences)

    def _fits(self, place: _Place, live: Any, ref: TensorRef, stored: Stored) -> bool:
        array = isinstance(live, np.ndarray)
        if array != ref.array or ref.requires_grad or (array and not live.flags.writeable):
            return False
        if difference(_shape_of(live), *stored[ref.key]):
            return False
        view = array_view(live) if array else live
        if view is not None and (may_overlap(view) or not self._copies.bind(view, ref.key)):
            return False
        self._kept[place] = view
        return True

    def _must_keep(self, live: Any) -> bool:
        return belongs_to_another(live) and not self._copies.is_bound(live)

    def _finished(self, tree: Any, content: Mapping[Any, Any], live: Any, within: Mapping[Any, Any]) -> Any:
        """Build a value from its restored parts, or return the live value, which stays or is refilled later."""
        kind = type(tree)
        same = content and len(within) == len(content) and (kind is Typed or kind is type(live) is tuple)
        if same and all(content.get(key, content) is part for key, part in within.items()):
            return live
        made = finished(tree, content, live, within)
        if type(live) in REFILLED and type(live) is type(made) and self._takes(live, tree, made):
            self._refills.append((live, made))
            return live
        return made

    def _takes(self, live: Any, tree: Any, made: Any) -> bool:
        return (type(live) is not deque or live.maxlen == made.maxlen) and self._copies.refill(live, tree, self._stored)

    def _tensor(self, make: Maker, ref: TensorRef, live: Any, place: _Place, *, now: bool = False) -> Any:
        if now:
            return make(ref, live, now=True)
        if place in self._kept:
            view = self._kept[place]
            if view is None:
                self._arrays.append((live, make(ref, None)))
            else:
                self._copies.want(_text(place), view, ref)
            return live
        device = live.device if isinstance(live, torch.Tensor) else None
        home = self._copies.shared(ref, device)  # Share memory again, as when it was saved.
        return make(ref, live) if home is None else home


def _text(place: _Place) -> str:
    return "/".join(map(str, place))


def _shape_of(live: Any) -> torch.Tensor:
    if isinstance(live, torch.Tensor):
        return live
    return torch.empty(live.shape, dtype=torch.from_numpy(np.empty(0, live.dtype)).dtype, device="meta")


def _tensors(live: Any, place: _Place) -> Iterator[tuple[_Place, Any]]:
    """Yield the place of every tensor and array in a value, with the tensor or array."""
    if has_memory(live):
        yield place, live
    for key, item in live_parts(live):
        if not is_scalar(item):
            yield from _tensors(item, (*place, key))


def _refs(
    tree: Any, live: Any, place: _Place, beside: Sequence[torch.Tensor] = ()
) -> Iterator[tuple[_Place, TensorRef, Any, Sequence[torch.Tensor]]]:
    """Yield every reference of a tree: its place, the live value at the place, and the tensors beside that value."""
    if type(tree) is TensorRef:
        yield place, tree, live, beside
    within = inside(tree, live)
    tensors = [value for value in within.values() if isinstance(value, torch.Tensor)]
    for key, item in parts_of(tree):
        if not is_scalar(item):
            yield from _refs(item, within.get(key), (*place, key), tensors)


def _kind(tree: Any) -> Any:
    """Return the kind of a value in a tree; numbers of all types have one kind, since they may replace each other."""
    kind = type(tree)
    if kind is TensorRef:
        return "array" if tree.array else "tensor"
    if kind is Typed and tree.tag != "~numpy":
        return (tree.tag, tree.head[0]) if tree.tag in ("~named", "~enum") else tree.tag
    return "number" if kind in (bool, int, float, complex, Typed) else kind


def _refill(live: Any, content: Any) -> None:
    live.clear()
    if isinstance(live, dict):
        for key, value in content.items():  # dict.update breaks an OrderedDict, and Counter.update adds counts.
            live[key] = value
    elif isinstance(live, set):
        live.update(content)
    else:
        live.extend(content)
