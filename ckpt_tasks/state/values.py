"""Nested values: from live ones to a tree with a TensorRef for every tensor, and back.

A tree (`format/tree.py`) holds plain values only. `pack` copies every container, so that a tree does not change while
training continues; tensors and arrays are collected, not copied. `unpack` makes the value again, type by type.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from typing import Any

import numpy as np
import torch

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.format.tree import MAX_DEPTH, NumpyScalar, TensorRef, TorchName, encode
from ckpt_tasks.state.tensors import TensorSet

__all__ = ["DICTS", "REFILLED", "SCALARS", "array_view", "has_state", "is_scalar", "pack", "unpack", "unpack_key"]

SCALARS = frozenset({type(None), bool, int, float, str, bytes, complex, datetime, date, timedelta})
DICTS = (dict, OrderedDict, Counter)
REFILLED = (*DICTS, list, set, deque)  # these stay the same objects and get new contents
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
    """Say whether an object has state_dict() and load_state_dict()."""
    if isinstance(value, type):
        return False  # a class itself also has the methods
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def pack(value: Any, path: str, tensors: TensorSet, depth: int = 0) -> Any:
    """Turn a value into a tree, collecting its tensors under keys that are their paths.

    Raises UnsupportedStateError with the path of the first value that cannot be stored.
    """
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        return tensors.add(value, path if "/" in path else f"{path}/value")
    if depth > MAX_DEPTH:
        hint = "Is there a cycle in it?"
        raise UnsupportedStateError(f"the state nests deeper than {MAX_DEPTH} levels", key=path[:200], hint=hint)
    if kind in DICTS:
        packed = {
            _pack_key(key, path): item
            if type(item) in SCALARS
            else pack(item, f"{path}/{_part(key, number)}", tensors, depth + 1)
            for number, (key, item) in enumerate(value.items())
        }
        return packed if kind is dict else kind(packed)
    if kind in (list, tuple):
        return kind(
            [
                item if type(item) in SCALARS else pack(item, f"{path}/{n}", tensors, depth + 1)
                for n, item in enumerate(value)
            ]
        )
    if kind is deque:
        return deque((pack(item, f"{path}/{n}", tensors, depth + 1) for n, item in enumerate(value)), value.maxlen)
    if kind in _SETS:
        return kind(_pack_key(item, path) for item in value)
    if kind is np.ndarray:
        return tensors.add(_as_tensor(value, path), path if "/" in path else f"{path}/value", array=True)
    return _pack_leaf(value, path)


def _part(key: Any, number: int) -> str:
    # A part of a tensor's name: readable, and without anything that a file's header cannot hold.
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
    encode(value, path)  # raises the reason
    return value


def is_scalar(value: Any) -> bool:
    """Say whether a value, live or in a tree, is stored as itself: one of SCALARS, which have no parts."""
    return type(value) in SCALARS


def array_view(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return a tensor that shares an array's memory; None if torch has no such view, or the array is read-only."""
    if not array.flags.writeable or any(step < 0 or step % array.itemsize for step in array.strides):
        return None
    return torch.from_numpy(array)


def _as_tensor(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    if array.dtype.name not in _ARRAY_DTYPES or not array.dtype.isnative:
        hint = "Numbers and booleans in the machine's byte order can be stored."
        raise UnsupportedStateError(f"an array of dtype {array.dtype} cannot be stored", key=path, hint=hint)
    view = array_view(array)
    return torch.from_numpy(array.copy(order="K")) if view is None else view


def unpack(tree: Any, make: Callable[[TensorRef, Any], Any], live: Any = None) -> Any:
    """Turn a tree into the value.

    `make(ref, live)` returns the tensor or array for a ref; its second argument is the value at the ref's place in
    `live`, which has a similar structure, or None. Raises IntegrityError if the tree has an unknown type or name.
    """
    kind = type(tree)
    if kind in SCALARS:
        return tree
    if kind is TensorRef:
        return make(tree, live)
    if kind in DICTS:
        inside = live if type(live) in DICTS else {}
        pairs = ((unpack_key(k), v) for k, v in tree.items())
        made = ((k, unpack(v, make, inside.get(k))) for k, v in pairs)
        return kind(dict(made)) if kind is Counter else kind(made)
    if kind in (list, tuple, deque):
        inside = live if type(live) is kind else ()
        count = len(inside)
        items = (unpack(item, make, inside[n] if n < count else None) for n, item in enumerate(tree))
        return deque(items, tree.maxlen) if kind is deque else kind(items)
    return unpack_key(tree)


def unpack_key(tree: Any) -> Any:
    """Turn the tree of a key, a set or a plain value into the value; raise IntegrityError for an unknown type."""
    kind = type(tree)
    if kind in (tuple, set, frozenset):
        return kind(unpack_key(item) for item in tree)
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
