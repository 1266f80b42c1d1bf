"""Conversion of other frameworks' arrays to tensors that share the arrays' memory, and back.

Torch lacks some one-byte dtypes of ml_dtypes (int4, float8_e4m3, …): such an array is kept as bytes with its dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ckpt_tasks.errors import StateMismatchError, UnsupportedStateError
from ckpt_tasks.state.tensors.tensors import DTYPES, ConstantTensor

Array = np.ndarray[Any, Any]

_TORCH = {name: dtype for dtype, name in DTYPES.items()}


class _Writable:
    """Shows the memory of a read-only array as writable, as torch requires; a save only reads the memory."""

    def __init__(self, array: Array):
        self._array = array  # This keeps the memory alive.
        shown = array.__array_interface__
        self.__array_interface__ = {**shown, "data": (shown["data"][0], False)}


def tensor_of(array: Array, key: str, *, constant: bool = False) -> Any:
    """Return a tensor that shares an array's memory; if torch lacks the dtype, its bytes with the dtype's name.

    `constant`: the program does not write to the memory while the array is referenced, so a save may copy it later.
    Raises UnsupportedStateError, which names the key, for an array of a dtype that cannot be stored, such as texts.
    """
    dtype, narrow = _TORCH.get(array.dtype.name), _is_of_ml_dtypes(array.dtype)
    if dtype is None and not (narrow and array.dtype.itemsize == 1):
        raise UnsupportedStateError(f"an array of {array.dtype} cannot be stored", key=key)
    bits = array.view(f"u{array.dtype.itemsize}") if narrow else array
    tensor = torch.from_numpy(np.asarray(_Writable(bits))).view(dtype or torch.uint8)
    shown = tensor.as_subclass(ConstantTensor) if constant else tensor
    return {"dtype": array.dtype.name, "data": shown} if dtype is None else shown


def array_of(saved: Any) -> Array:
    """Return the array of a `tensor_of` result; both share their memory."""
    name, tensor = (saved["dtype"], saved["data"]) if isinstance(saved, Mapping) else (DTYPES[saved.dtype], saved)
    dtype = np.dtype(name)
    if not _is_of_ml_dtypes(dtype):
        return np.asarray(tensor.numpy())
    return np.asarray(tensor.view(getattr(torch, f"uint{8 * tensor.itemsize}")).numpy()).view(dtype)


def _is_of_ml_dtypes(dtype: np.dtype[Any]) -> bool:
    return dtype.isbuiltin == 2  # 2: a package has registered the dtype; these frameworks use ml_dtypes.


def compared(
    saved: Mapping[str, Any], live: Iterable[str], what: str, *, different: Iterable[str] = (), hint: str | None = None
) -> None:
    """Raise StateMismatchError if the names in a checkpoint and in the program differ, or if `different` has items."""
    here = {*live}
    missing, unexpected, different = sorted(here - saved.keys()), sorted(saved.keys() - here), tuple(different)
    if missing or unexpected or different:
        raise StateMismatchError(
            f"{what} is another one than the checkpoint's",
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            different=different,
            hint=hint,
        )


def array_difference(name: str, array: Any, live: Any) -> str | None:
    """Return how an array's shape or dtype differs from the program's array; None if they are equal."""
    here, there = ((tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in (live, array))
    return None if here == there else f"{name}: {here[1]}{[*here[0]]} here, {there[1]}{[*there[0]]} in the checkpoint"
