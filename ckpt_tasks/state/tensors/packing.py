"""Conversion of nested values into a tree with a TensorRef for every tensor, and back.

A tree (`format/tree.py`) holds plain values only. `pack` copies every container, so that a tree does not change while
training continues; it collects tensors and arrays without copying them. `unpack` makes the value again.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.format.tree import (
    MAPPINGS,
    MAX_DEPTH,
    NUMBERS,
    SCALARS,
    SEQUENCES,
    SETS,
    TensorRef,
    Typed,
    children,
    ref_like,
    refusal,
)
from ckpt_tasks.state.tensors.tensors import ConstantTensor, TensorSet
from ckpt_tasks.state.tensors.value_kinds import KINDS, build, kind_of_value

REFILLED = (*MAPPINGS, list, set, deque, bytearray)  # A restore keeps these objects and gives them new contents.


def has_state(value: Any) -> bool:
    """Return True if an object has state_dict() and load_state_dict()."""
    if isinstance(value, type):
        return False  # A class has these methods, too, but only its instances have a state.
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def pack(value: Any, path: str, tensors: TensorSet, depth: int = 0) -> Any:
    """Turn a value into a tree, and collect its tensors by their paths.

    Raises UnsupportedStateError with the path of the first value that cannot be stored.
    """
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is ConstantTensor:
        ref = pack(value.as_subclass(torch.Tensor), path, tensors, depth)
        tensors.constant.add(ref.key)
        return ref
    place = path if "/" in path else f"{path}/value"
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        try:
            return tensors.add(value, place)
        except UnsupportedStateError:
            if kind_of_value(value) is None:
                raise
    if depth > MAX_DEPTH:
        hint = "Is there a cycle in it?"
        raise UnsupportedStateError(f"the state nests deeper than {MAX_DEPTH} levels", key=path[:200], hint=hint)
    if kind in MAPPINGS:
        packed = {
            _pack_key(key, path): item
            if type(item) in SCALARS
            else pack(item, f"{path}/{_part(key, number)}", tensors, depth + 1)
            for number, (key, item) in enumerate(value.items())
        }
        _refuse_lost(value, packed, path)
        return packed if kind is dict else ref_like(value, packed)
    if kind in SEQUENCES:
        return _pack_sequence(value, path, tensors, depth)
    if kind in SETS:
        return _pack_set(value, path)
    if kind is np.ndarray and _is_ordinary(value):
        view = array_view(value)
        copied = torch.from_numpy(value.copy(order="K")) if view is None else view
        return tensors.add(copied, place, array=True)
    tag, head, parts = _taken(value, path)
    return Typed(tag, head, {name: pack(part, f"{path}/{name}", tensors, depth + 1) for name, part in parts.items()})


def _pack_sequence(value: Any, path: str, tensors: TensorSet, depth: int) -> Any:
    items = [
        item if type(item) in SCALARS else pack(item, f"{path}/{n}", tensors, depth + 1) for n, item in enumerate(value)
    ]
    return items if type(value) is list else tuple(items) if type(value) is tuple else ref_like(value, items)


def _taken(value: Any, path: str, *, key: bool = False) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
    tag = kind_of_value(value)
    if tag is None or (key and not KINDS[tag].key):
        raise refusal(value, f"{path}/<{value!r:.60}>" if key else path, nested=has_state(value))
    try:
        return tag, *KINDS[tag].take(value)
    except UnsupportedStateError as error:
        error.key = path
        raise


def _part(key: Any, number: int) -> str:
    # Return a part of a tensor's path: readable, and with characters that a file's header can hold.
    if type(key) is str and len(key) <= 200 and (key.isascii() or _is_text(key)):
        return key
    return str(key) if type(key) in (int, bool) else f"item{number}"


def _is_text(key: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in key)


def _pack_key(key: Any, path: str) -> Any:
    kind = type(key)
    if kind in SCALARS:
        return _one_nan(key) if kind is float else key
    if kind is tuple:
        return tuple(_pack_key(item, path) for item in key)
    if kind is frozenset:
        return _pack_set(key, path)
    tag, head, parts = _taken(key, path, key=True)
    return Typed(tag, tuple(map(_one_nan, head)), {name: _pack_key(part, path) for name, part in parts.items()})


def _pack_set(value: Any, path: str) -> Any:
    packed = type(value)(_pack_key(item, path) for item in value)
    _refuse_lost(value, packed, path)
    return packed


def _one_nan(value: Any) -> Any:
    # As keys, two NaN objects differ; read back they would be one object.
    return math.nan if type(value) is float and math.isnan(value) else value


def _refuse_lost(keys: Collection[Any], packed: Collection[Any], path: str) -> None:
    """Raise UnsupportedStateError if several keys are equal once packed: NaNs, or Enums of two classes of one name."""
    if len(packed) < len(keys):
        count = Counter(_pack_key(key, path) for key in keys)
        key = next(key for key in keys if count[_pack_key(key, path)] > 1)
        raise UnsupportedStateError(
            f"{count[_pack_key(key, path)]} keys would be stored as one",
            key=f"{path}/<key {key!r:.60}>",
            hint="They differ as objects of the program only: use keys that differ in their values, such as texts.",
        )


def is_scalar(value: Any) -> bool:
    """Return True if a tree has this value unchanged: its type is in SCALARS."""
    return type(value) in SCALARS


def array_view(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return a tensor that shares an array's memory; None if torch cannot view it, or the array is read-only."""
    if not array.flags.writeable or any(step < 0 or step % array.itemsize for step in array.strides):
        return None
    return torch.from_numpy(array)


def _is_ordinary(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.name in NUMBERS and array.dtype.isnative


def parts_of(tree: Any) -> Iterable[tuple[Any, Any]]:
    """Return the parts of a tree, each with its key as a live value, its position or its name."""
    if type(tree) in MAPPINGS:
        return ((_unpack_key(key), part) for key, part in tree.items())
    return children(tree)


def live_parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the parts of a live value that a restore writes into, each with its key, position or name."""
    kind = type(value)
    if kind in MAPPINGS or kind in SEQUENCES:
        return children(value)
    tag = None if kind in SCALARS or isinstance(value, torch.Tensor) else kind_of_value(value)
    return KINDS[tag].take(value)[1].items() if tag is not None and _has_place(tag, value) else ()


def has_memory(value: Any) -> bool:
    """Return True if a value is a tensor or an array that a checkpoint stores as one tensor."""
    if isinstance(value, torch.Tensor):
        return kind_of_value(value) is None
    return type(value) is np.ndarray and _is_ordinary(value)


def in_place(value: Any) -> bool:
    """Return True if a restore can write into the value itself, without assigning to its container."""
    if type(value) is np.ndarray:
        return value.flags.writeable and (_is_ordinary(value) or value.flags.c_contiguous)
    return has_memory(value) or isinstance(value, REFILLED)


def _has_place(tag: str, value: Any) -> bool:
    return KINDS[tag].place and (tag != "~array" or (in_place(value) and not _is_ordinary(value)))


def inside(tree: Any, live: Any) -> Mapping[Any, Any]:
    """Return the parts of a live value of the tree's kind that the tree will replace; {} for another kind."""
    kind, own = type(tree), type(live)
    if kind in MAPPINGS:
        return live if own in MAPPINGS else {}
    if kind in SEQUENCES:
        return dict(enumerate(live)) if own is kind else {}
    if kind is not Typed or live is None or kind_of_value(live) != tree.tag or not _has_place(tree.tag, live):
        return {}
    head, parts = KINDS[tree.tag].take(live)
    fits = parts.keys() == tree.parts.keys() if tree.tag == "~named" else head == tree.head
    return parts if fits else {}


def unpack(tree: Any, make: Callable[..., Any], live: Any = None) -> Any:
    """Turn a tree into the value that it describes.

    `make(ref, old, now=…)` returns the tensor or array for a ref; if `now`, it must already have its values. `old` is
    the value at the ref's place in `live`, which is an object of a similar structure or None. Raises IntegrityError if
    the tree has an unknown type or name.
    """
    return rebuilt(tree, live, lambda ref, here, place, **how: make(ref, here, **how))


def finished(tree: Any, content: Mapping[Any, Any], live: Any, within: Mapping[Any, Any]) -> Any:
    """Build the value of a tree from its restored parts; `live` is the old value, with the parts `within`."""
    kind = type(tree)
    if kind in MAPPINGS or kind in SEQUENCES:
        return ref_like(tree, content if kind in MAPPINGS else content.values())
    return build(tree, dict(content), live) if kind is Typed else _unpack_key(tree)


def rebuilt(
    tree: Any,
    live: Any,
    tensor: Callable[..., Any],
    finish: Callable[[Any, Mapping[Any, Any], Any, Mapping[Any, Any]], Any] = finished,
    place: tuple[Any, ...] = (),
) -> Any:
    """Turn a tree into its value: call `tensor(ref, live, place, now=…)` for each ref, `finish` for other values."""
    kind = type(tree)
    if kind in SCALARS:
        return tree
    if kind is TensorRef:
        return tensor(tree, live, place)
    if kind in SETS or (kind is Typed and not tree.parts):
        return finish(tree, {}, live, {})
    within = inside(tree, live)
    if kind is Typed and KINDS[tree.tag].reads:
        tensor = partial(tensor, now=True)
    content = {
        key: part if type(part) in SCALARS else rebuilt(part, within.get(key), tensor, finish, (*place, key))
        for key, part in parts_of(tree)
    }
    return finish(tree, content, live, within)


def _unpack_key(tree: Any) -> Any:
    kind = type(tree)
    if kind in SCALARS:
        return tree
    if kind is tuple or kind in SETS:
        return kind(map(_unpack_key, tree))
    if kind is Typed and KINDS[tree.tag].key:
        return build(tree, {name: _unpack_key(part) for name, part in tree.parts.items()}, None)
    raise IntegrityError(f"the state tree holds an unknown {kind.__qualname__}")
