"""Plain values: restored into the objects that the program already holds, as far as they can be.

A tensor or an array keeps its memory, and so does every tensor inside a container that requires a gradient: an
optimizer holds on to it. These must have the stored shape and dtype. A dict, list, set or deque stays the object that
it is and gets new contents. Whatever else there is (a number, a string, a tuple) is assigned to its name in the state.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.format.tree import TensorRef
from ckpt_tasks.state.groups import Copies, Differences, Guard, Maker
from ckpt_tasks.state.sources import TensorSource
from ckpt_tasks.state.tensors import TensorSet
from ckpt_tasks.state.values import pack, unpack

__all__ = ["PlainPart"]

_REFILLED = (dict, OrderedDict, Counter, list, set, deque)


class PlainPart:
    """Restore one plain value of a state."""

    guard: Guard | None = None

    def __init__(self, state: Mapping[str, Any], name: str, tree: Any):
        self._state = state
        self._name = name
        self._tree = tree
        self._live = state[name]
        self._copies = Copies()
        self._array: np.ndarray[Any, Any] | None = None
        self._value: Any = None
        self._packed = pack(self._live, name, TensorSet())  # what could not be saved from here is refused here too
        if not isinstance(state, MutableMapping) and not isinstance(self._live, (torch.Tensor, np.ndarray, *_REFILLED)):
            hint = "Give the state as a dict: a number or a string is restored by assigning it there."
            raise UnsupportedStateError("the state is read-only", key=name, hint=hint)

    def compare(self, differences: Differences) -> None:
        """Compare what keeps its memory."""
        if isinstance(self._live, torch.Tensor):
            if type(self._tree) is TensorRef and self._tree.array:
                differences.differ(self._name, "a tensor here, an array in the checkpoint")
            else:
                differences.tensor(self._name, self._live, self._tree)
        elif isinstance(self._live, np.ndarray):
            self._compare_array(differences)
        else:
            self._compare_inside(differences)

    def prepare(self, source: TensorSource) -> None:
        """Make the new value."""
        if isinstance(self._live, np.ndarray):
            self._array = Maker(source)(self._tree, None)
            self._value = self._live
            return
        make = Maker(source)

        def make_or_keep(ref: TensorRef, live: Any) -> Any:
            if isinstance(live, torch.Tensor) and (live is self._live or live.requires_grad):
                self._copies.want(self._name, live, ref)
                return live
            return make(ref, live)

        self._value = unpack(self._tree, make_or_keep, self._live)
        self._copies.prepare(source)

    def write(self) -> None:
        """Copy, refill or assign."""
        self._copies.write()
        if self._array is not None:
            np.copyto(self._live, self._array)
        if self._value is not self._live and not _refill(self._live, self._value):
            assert isinstance(self._state, MutableMapping)
            self._state[self._name] = self._value

    def _compare_array(self, differences: Differences) -> None:
        if type(self._tree) is not TensorRef or not self._tree.array:
            differences.differ(self._name, "an array here, another value in the checkpoint")
        elif not self._live.flags.writeable:
            differences.differ(self._name, "a read-only array here")
        else:
            differences.tensor(
                self._name, torch.empty(self._live.shape, dtype=_dtype(self._live), device="meta"), self._tree
            )

    def _compare_inside(self, differences: Differences) -> None:
        trained: dict[int, str] = {}

        def note(ref: TensorRef, live: Any) -> None:
            if _is_trained(live):
                trained[id(live)] = ref.key

        def compare(ref: TensorRef, live: Any) -> None:
            if _is_trained(live):
                differences.tensor(trained.pop(id(live), ref.key), live, ref)

        unpack(self._packed, note, self._live)
        unpack(self._tree, compare, self._live)
        differences.missing += trained.values()


def _is_trained(live: Any) -> bool:
    return isinstance(live, torch.Tensor) and live.requires_grad


def _dtype(array: np.ndarray[Any, Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def _refill(live: Any, value: Any) -> bool:
    if type(live) is not type(value) or type(live) not in _REFILLED:
        return False
    if isinstance(live, dict):
        live.clear()
        dict.update(live, value)  # a Counter's own update adds
    elif isinstance(live, list):
        live[:] = value
    elif isinstance(live, set):
        live.clear()
        live.update(value)
    elif live.maxlen == value.maxlen:
        live.clear()
        live.extend(value)
    else:
        return False
    return True
