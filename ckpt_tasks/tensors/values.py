"""Nested values: from live values to a tree with a TensorRef for every tensor, and back.

A tree (`format/tree.py`) holds plain values only. `pack` copies every container, so that a tree does not change while
training continues; tensors and arrays are collected, not copied. `unpack` makes the value again, type by type.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from datetime import date, datetime, timedelta
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.format.tree import (
    MAPPINGS,
    MAX_DEPTH,
    SEQUENCES,
    NumpyScalar,
    TensorRef,
    TorchName,
    Typed,
    children,
    encode,
)
from ckpt_tasks.tensors.kinds import KINDS, build, kind_of_value
from ckpt_tasks.tensors.tensors import TensorSet

__all__ = [
    "REFILLED",
    "SCALARS",
    "array_view",
    "finished",
    "has_memory",
    "has_state",
    "in_place",
    "inside",
    "is_scalar",
    "like",
    "live_parts",
    "pack",
    "parts_of",
    "unpack",
    "unpack_key",
]

SCALARS = frozenset({type(None), bool, int, float, str, bytes, complex, datetime, date, timedelta})
REFILLED = (*MAPPINGS, list, set, deque, bytearray)  # These stay the same objects and get new contents.
_SETS = (set, frozenset)
_SCALARS = (np.bool_, np.integer, np.floating, np.complexfloating)
_ARRAY_DTYPES = frozenset(
    f"{kind}{bits}"
    for kind, widths in {
        "int": (8, 16, 32, 64),
        "uint": (8, 16, 32, 64),
        "float": (16, 32, 64),
        "complex": (64, 128),
    }.items()
    for bits in widths
) | {"bool"}


def has_state(value: Any) -> bool:
    """Return True if an object has state_dict() and load_state_dict()."""
    if isinstance(value, type):
        return False  # The class itself has the methods, too.
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def pack(value: Any, path: str, tensors: TensorSet, depth: int = 0) -> Any:
    """Turn a value into a tree, collecting its tensors under keys that are their paths.

    Raises UnsupportedStateError with the path of the first value that cannot be stored.
    """
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        try:
            return tensors.add(value, path if "/" in path else f"{path}/value")
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
        return packed if kind is dict else like(value, packed)
    if kind in SEQUENCES:
        items = [
            item if type(item) in SCALARS else pack(item, f"{path}/{n}", tensors, depth + 1)
            for n, item in enumerate(value)
        ]
        return items if kind is list else tuple(items) if kind is tuple else like(value, items)
    if kind in _SETS:
        return kind(_pack_key(item, path) for item in value)
    if kind is np.ndarray and _is_ordinary(value):
        return tensors.add(_as_tensor(value), path if "/" in path else f"{path}/value", array=True)
    if (tag := kind_of_value(value)) is not None:
        head, parts = _taken(tag, value, path)
        return Typed(
            tag, head, {name: pack(part, f"{path}/{name}", tensors, depth + 1) for name, part in parts.items()}
        )
    return _pack_leaf(value, path)


def _taken(tag: Any, value: Any, path: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        return KINDS[tag].take(value)
    except UnsupportedStateError as error:
        error.key = path
        raise


def like(model: Any, content: Any) -> Any:
    """Make a container of the model's type, with its `maxlen` or its factory, and other contents."""
    kind = type(model)
    if kind is deque:
        return deque(content, model.maxlen)
    return defaultdict(model.default_factory, content) if kind is defaultdict else kind(content)


def _part(key: Any, number: int) -> str:
    # A part of a tensor's name: readable, and only with characters that a file's header can hold.
    if type(key) is str and len(key) <= 200 and (key.isascii() or _is_text(key)):
        return key
    return str(key) if type(key) in (int, bool) else f"item{number}"


def _is_text(key: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in key)


def _pack_key(key: Any, path: str) -> Any:
    kind = type(key)
    if kind in SCALARS:
        return key
    if kind in (tuple, frozenset):
        return kind(_pack_key(item, path) for item in key)
    if (tag := kind_of_value(key)) is not None and KINDS[tag].key:  # A tree has equal hashes, too.
        head, parts = _taken(tag, key, path)
        return Typed(tag, head, {name: _pack_key(part, path) for name, part in parts.items()})
    return _pack_leaf(key, f"{path}/<{key!r:.60}>")


def _pack_leaf(value: Any, path: str) -> Any:
    if isinstance(value, torch.dtype):
        return TorchName("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return TorchName("device", str(value))
    if type(value) is torch.Size:
        return TorchName("size", tuple(value))
    if isinstance(value, _SCALARS) and value.dtype.name in _ARRAY_DTYPES:
        return NumpyScalar(value.dtype.name, value.item())
    if has_state(value):
        kind = type(value)
        raise UnsupportedStateError(
            f"a value of type {kind.__module__}.{kind.__qualname__} inside another one cannot be stored",
            key=path,
            hint="Give it a name of its own at the top of the state.",
        )
    encode(value, path)  # Raises the reason.
    return value


def is_scalar(value: Any) -> bool:
    """Return True if a value, live or in a tree, is stored as itself: its type is in SCALARS, it has no parts."""
    return type(value) in SCALARS


def array_view(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return a tensor that shares an array's memory; None if torch cannot view it, or the array is read-only."""
    if not array.flags.writeable or any(step < 0 or step % array.itemsize for step in array.strides):
        return None
    return torch.from_numpy(array)


def _is_ordinary(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.name in _ARRAY_DTYPES and array.dtype.isnative


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    view = array_view(array)
    return torch.from_numpy(array.copy(order="K")) if view is None else view


def parts_of(tree: Any) -> Iterable[tuple[Any, Any]]:
    """Return the parts of a tree, each with its live key, position or name."""
    if type(tree) in MAPPINGS:
        return ((unpack_key(key), part) for key, part in tree.items())
    return children(tree)


def live_parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the parts of a live value that a restore writes into, each with its key, position or name."""
    kind = type(value)
    if kind in MAPPINGS or kind in SEQUENCES:
        return children(value)
    tag = None if kind in SCALARS or isinstance(value, torch.Tensor) else kind_of_value(value)
    return KINDS[tag].take(value)[1].items() if tag is not None and _has_place(tag, value) else ()


def has_memory(value: Any) -> bool:
    """Return True if a value is a tensor or an array that is stored as one tensor."""
    if isinstance(value, torch.Tensor):
        return kind_of_value(value) is None
    return type(value) is np.ndarray and _is_ordinary(value)


def in_place(value: Any) -> bool:
    """Return True if a restore can write into the value itself, so that its container needs no new item."""
    if type(value) is np.ndarray:
        return value.flags.writeable and (_is_ordinary(value) or value.flags.c_contiguous)
    return has_memory(value) or isinstance(value, REFILLED)


def _has_place(tag: str, value: Any) -> bool:
    return KINDS[tag].place and (tag != "~array" or (in_place(value) and not _is_ordinary(value)))


def inside(tree: Any, live: Any) -> Mapping[Any, Any]:
    """Return the parts of the live value that a tree replaces, if it is of the tree's kind."""
    kind, own = type(tree), type(live)
    if kind in MAPPINGS:
        return live if own in MAPPINGS else {}
    if kind in SEQUENCES:
        return dict(enumerate(live)) if own is kind else {}
    if kind is not Typed or kind_of_value(live) != tree.tag or not _has_place(tree.tag, live):
        return {}
    head, parts = KINDS[tree.tag].take(live)
    fits = parts.keys() == tree.parts.keys() if tree.tag == "~named" else head == tree.head
    return parts if fits else {}


class Make(Protocol):
    """Makes the tensor or array for a ref; with `now` it has its values at once."""

    def __call__(self, ref: TensorRef, live: Any, *, now: bool = False) -> Any: ...


def unpack(tree: Any, make: Make, live: Any = None) -> Any:
    """Turn a tree into the value.

    `make(ref, live)` returns the tensor or array for a ref; `live` is the value that it replaces in the argument
    `live`, which has a similar structure, or None. Raises IntegrityError if the tree has an unknown type or name.
    """
    kind = type(tree)
    if kind in SCALARS:
        return tree
    if kind is TensorRef:
        return make(tree, live)
    if kind not in MAPPINGS and kind not in SEQUENCES and kind is not Typed:
        return unpack_key(tree)
    within = inside(tree, live)
    make = partial(make, now=True) if kind is Typed and KINDS[tree.tag].reads else make
    content = {key: unpack(part, make, within.get(key)) for key, part in parts_of(tree)}
    return finished(tree, content, live)


def finished(tree: Any, content: Mapping[Any, Any], live: Any) -> Any:
    """Make a tree's value from its parts, which are made already; `live` is the value that it replaces."""
    if type(tree) is Typed:
        return build(tree, dict(content), live)
    return like(tree, content if type(tree) in MAPPINGS else content.values())


def unpack_key(tree: Any) -> Any:
    """Turn the tree of a key, a set or a plain value into the value; raise IntegrityError for an unknown type."""
    kind = type(tree)
    if kind in (tuple, set, frozenset):
        return kind(unpack_key(item) for item in tree)
    if kind is Typed and KINDS[tree.tag].key:
        return build(tree, {name: unpack_key(part) for name, part in tree.parts.items()}, None)
    if kind is NumpyScalar and tree.dtype in _ARRAY_DTYPES:
        return np.dtype(tree.dtype).type(tree.value)
    if kind is TorchName:
        return _torch_value(tree)
    if kind not in SCALARS:
        raise IntegrityError(f"the state tree holds an unknown {kind.__qualname__}")
    return tree


def _torch_value(name: TorchName) -> torch.dtype | torch.device | torch.Size:
    if name.kind == "size":
        return torch.Size(name.value)  # type: ignore[arg-type]
    text = str(name.value)
    if name.kind == "device":
        try:
            return torch.device(text)
        except RuntimeError as error:
            raise IntegrityError(f"the state tree names the device {text!r:.80}") from error
    value = getattr(torch, text, None)
    if not isinstance(value, torch.dtype):
        raise IntegrityError(f"the state tree names the dtype {text!r}")
    return value
