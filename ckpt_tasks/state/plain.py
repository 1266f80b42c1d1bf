"""Plain values: restored into the objects that the program already holds, as far as possible.

A dict, list, set or deque stays the same object and gets new contents. A tensor or an array keeps its memory. Three
kinds of tensor must have the stored shape and dtype: a group that is itself a tensor, a tensor that requires a gradient
(an optimizer holds it), and one that belongs to a live module or optimizer. Any other tensor that does not fit is
replaced. A number, a string or a tuple is assigned to its place.

`module.state_dict()` is a dict of the module's own tensors, so a restore into it restores the module. An optimizer's
state_dict is not: its numbers are copies, and its tensors come with the first step. A restore into it would restore
nothing, so it is refused, as are the state_dicts of schedules and scalers.

The holders of a tensor are not searched for: listing all live objects with the garbage collector makes
`tuple(x for x in …)` fail in every other thread, and takes half a second in a large process.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.format.tree import TensorRef
from ckpt_tasks.state.copies import Copies
from ckpt_tasks.state.restore_parts import Differences, Maker, Rollback, Stored, TensorSource
from ckpt_tasks.state.tensors import TensorSet, difference, may_overlap
from ckpt_tasks.state.values import DICTS, REFILLED, array_view, is_scalar, pack, unpack_key

__all__ = ["PlainPart", "belongs_to_another", "refuse_copies_of_state"]

_CONTAINERS = frozenset({*DICTS, list, tuple, deque})
_OF_OPTIMIZERS = frozenset({"state", "param_groups"})
_OF_OTHERS = {
    "a learning-rate schedule": frozenset({"last_epoch", "_last_lr"}),
    "a GradScaler": frozenset({"scale", "_growth_tracker"}),
}


def belongs_to_another(value: Any) -> bool:
    """Say whether a tensor is a detached alias of another one, as `state_dict()` returns for parameters."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
        return False
    if value._base is not None or value.untyped_storage().nbytes() != value.nbytes:
        return False  # a view: its base holds the memory
    return _uses(value) > _uses(torch.empty(1))


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def refuse_copies_of_state(value: Any, name: str) -> None:
    """Raise UnsupportedStateError if a plain value contains a `state_dict()` through which a restore reaches nothing.

    A program's own copy of an optimizer's state is allowed: no live optimizer holds its tensors.
    """
    for what, keys in _OF_OTHERS.items():
        if type(value) in DICTS and keys <= value.keys():
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
    kind = type(value)
    if kind in DICTS:
        yield path, value
        items: Any = value.items()
    elif kind in _CONTAINERS:
        items = enumerate(value)
    else:
        return
    for key, item in items:
        if type(item) in _CONTAINERS:
            yield from _dicts(item, f"{path}/{key}")


def _is_of_an_optimizer(value: Mapping[Any, Any]) -> bool:
    groups = value.get("param_groups") if value.keys() >= _OF_OPTIMIZERS else None
    return isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)


def _is_live(value: Mapping[Any, Any]) -> bool:
    """Say whether a live optimizer holds the state's tensors, or the state has no tensors yet."""
    entries = value["state"]
    return not entries or max(_references(entries)) > max(_references({0: {}}))


def _references(entries: Mapping[Any, Any]) -> list[int]:
    return [sys.getrefcount(entry) for entry in entries.values()]


_SEQUENCES = (list, tuple, deque)

_Place = tuple[Any, ...]  # the group's name, then keys and indices


class PlainPart:
    """Restore one plain value of a state."""

    guard: Rollback | None = None

    def __init__(self, state: Mapping[str, Any], name: str, tree: Any, copies: Copies):
        self._state = state
        self._name = name
        self._tree = tree
        self._live = state[name]
        self._copies = copies
        self._kept: dict[
            _Place, torch.Tensor | None
        ] = {}  # a view of each tensor or array that keeps its memory; None: an array that torch cannot view
        self._refills: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], Any]] = []
        self._value: Any = None
        self._stored: Stored = {}
        pack(self._live, name, TensorSet())  # refuse a target that could not be saved
        refuse_copies_of_state(self._live, name)
        if not isinstance(state, MutableMapping) and not isinstance(self._live, (torch.Tensor, np.ndarray, *REFILLED)):
            hint = "Give the state as a dict: a number or a string is restored by assigning it there."
            raise UnsupportedStateError("the state is read-only", key=name, hint=hint)

    def compare(self, differences: Differences) -> None:
        """Compare the tensors that must fit: a group that is a tensor, and those that require a gradient."""
        top, self._stored = (self._name,), differences.stored
        strict = {place: live for place, live in _tensors(self._live, top) if _must_fit(place, live)}
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
        """Compare the tensors and arrays that `compare` has not: they keep their memory if the stored values fit in.

        If they do not fit, `prepare` makes new ones. Notes a difference where that is not possible, because a live
        object such as a module owns the memory.
        """
        top = (self._name,)
        rest = {place: live for place, live in _tensors(self._live, top) if not _must_fit(place, live)}
        for place, ref, _, beside in _refs(self._tree, self._live, top):
            if place in self._kept:
                continue
            live = rest.get(place)
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

    def prepare(self, source: TensorSource) -> None:
        """Make new values, and request the copies."""
        self._value = self._made(self._tree, self._live, (self._name,), Maker(source))

    def write(self) -> None:
        """Refill containers and assign values, after the copies into tensors."""
        for array, values in self._arrays:
            np.copyto(array, values)
        for live, content in self._refills:
            _refill(live, content)
        if self._value is not self._live:
            assert isinstance(self._state, MutableMapping)
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

    def _fits(self, place: _Place, live: Any, ref: TensorRef, stored: Stored) -> bool:
        array = isinstance(live, np.ndarray)
        if array != ref.array or ref.requires_grad or (array and not live.flags.writeable):
            return False
        if difference(_shape_of(live) if array else live, *stored[ref.key]):
            return False
        view = array_view(live) if array else live
        if view is not None and (may_overlap(view) or not self._copies.bind(view, ref.key)):
            return False
        self._kept[place] = view
        return True

    def _must_keep(self, live: Any) -> bool:
        return belongs_to_another(live) and not self._copies.is_bound(live)

    def _made(self, tree: Any, live: Any, place: _Place, make: Maker) -> Any:
        kind = type(tree)
        if kind is TensorRef:
            return self._tensor(tree, live, place, make)
        if kind not in DICTS and kind not in _SEQUENCES and kind not in (set, frozenset):
            return unpack_key(tree)
        content = self._content(tree, live, place, make)
        if kind is tuple and type(live) is tuple and len(live) == len(content):
            if all(old is new for old, new in zip(live, content, strict=True)):
                return live
        elif kind in REFILLED and type(live) is kind and self._takes(live, tree):
            self._refills.append((live, content))
            return live
        if kind is deque:
            return deque(content, tree.maxlen)
        return content if type(content) is kind else kind(content)

    def _content(self, tree: Any, live: Any, place: _Place, make: Maker) -> Any:
        """Make the contents of a container: a dict, a list or a set."""
        kind = type(tree)
        if kind in DICTS:
            inside = live if type(live) in DICTS else {}
            keys = [unpack_key(key) for key in tree]
            return {
                key: self._made(item, inside.get(key), (*place, key), make)
                for key, item in zip(keys, tree.values(), strict=True)
            }
        if kind in _SEQUENCES:
            inside = live if type(live) is kind else ()
            count = len(inside)
            return [
                self._made(item, inside[n] if n < count else None, (*place, n), make) for n, item in enumerate(tree)
            ]
        return unpack_key(tree)

    def _takes(self, live: Any, tree: Any) -> bool:
        return (type(live) is not deque or live.maxlen == tree.maxlen) and self._copies.refill(live, tree, self._stored)

    def _tensor(self, ref: TensorRef, live: Any, place: _Place, make: Maker) -> Any:
        if place in self._kept:
            view = self._kept[place]
            if view is None:
                self._arrays.append((live, make(ref, None)))
            else:
                self._copies.want(_text(place), view, ref)
            return live
        home = self._copies.home(ref.key)  # it shared memory when it was saved, so it does again
        if home is not None and (not isinstance(live, torch.Tensor) or live.device == home.device):
            if ref.array and home.is_cpu:
                return home.detach().numpy()
            if ref.requires_grad == home.requires_grad and not ref.array:
                return home
            if home.requires_grad and not ref.array:
                return home.detach()
        return make(ref, live)


def _must_fit(place: _Place, live: Any) -> bool:
    return len(place) == 1 or (isinstance(live, torch.Tensor) and live.requires_grad)


def _text(place: _Place) -> str:
    return "/".join(map(str, place))


def _shape_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, device="meta")


def _tensors(live: Any, place: _Place) -> Iterator[tuple[_Place, Any]]:
    """Yield every tensor and array of a value with its place."""
    kind = type(live)
    if isinstance(live, (torch.Tensor, np.ndarray)):
        yield place, live
    elif kind in DICTS or kind in _SEQUENCES:
        for key, item in live.items() if kind in DICTS else enumerate(live):
            if not is_scalar(item):
                yield from _tensors(item, (*place, key))


def _refs(
    tree: Any, live: Any, place: _Place, beside: Sequence[torch.Tensor] = ()
) -> Iterator[tuple[_Place, TensorRef, Any, Sequence[torch.Tensor]]]:
    """Yield every ref of a tree: its place, the live value there, and the tensors beside that value."""
    kind = type(tree)
    if kind is TensorRef:
        yield place, tree, live, beside
    elif kind in DICTS:
        inside = live if type(live) in DICTS else {}
        tensors = [value for value in inside.values() if isinstance(value, torch.Tensor)]
        for key, item in tree.items():
            if not is_scalar(item):
                own = unpack_key(key)
                yield from _refs(item, inside.get(own), (*place, own), tensors)
    elif kind in _SEQUENCES:
        inside = live if type(live) is kind else ()
        tensors = [value for value in inside if isinstance(value, torch.Tensor)]
        for n, item in enumerate(tree):
            if not is_scalar(item):
                yield from _refs(item, inside[n] if n < len(inside) else None, (*place, n), tensors)


def _refill(live: Any, content: Any) -> None:
    live.clear()
    if isinstance(live, dict):
        for key, value in content.items():  # dict.update would break an OrderedDict, and Counter.update adds
            live[key] = value
    elif isinstance(live, set):
        live.update(content)
    else:
        live.extend(content)
