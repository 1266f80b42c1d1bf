"""The kinds of groups in the format, and checks of a group's tree before a restore uses it.

A restore takes positions, strides, flags and states of random streams from a tree. NumPy would follow a position
outside a stream's numbers and read other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.parsing import finite, text, well_formed, whole
from ckpt_tasks.format.tree import NUMBERS, TensorRef

RNG = "rng"  # This group has the process's random streams.

_DIFFERENTIABLE = ("float", "bfloat", "complex")
# The length of the buffer into which each position field of NumPy's bit generators points.
_POSITIONS = {"pos": 624, "buffer_pos": 4}


def check_group(name: str, kind: str, tree: Any) -> None:
    """Raise IntegrityError if a group's tree does not fit its kind; accept every tree of an unknown kind.

    The name `rng` is reserved: a group of that name must hold random streams.
    """
    if (name == RNG) != (kind == RNG):
        raise IntegrityError(f"the group {name} is of the kind {kind:.40}", key=name)
    known = KINDS.get(kind)
    with well_formed(f"the tree of kind {kind}", name):
        if known is not None and known.check is not None:
            known.check(tree)


def check_ref(ref: TensorRef, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise IntegrityError if a reference's array flag, strides or gradient flag do not fit this dtype and shape."""
    if ref.array and (dtype not in NUMBERS or ref.requires_grad):
        raise IntegrityError(f"{dtype} is not a dtype of an array, or the array takes a gradient", key=ref.key)
    if ref.requires_grad and not dtype.startswith(_DIFFERENTIABLE):
        raise IntegrityError(f"a tensor of {dtype} cannot take a gradient", key=ref.key)
    if ref.stride is not None and len(ref.stride) != len(shape):
        raise IntegrityError(f"{len(ref.stride)} strides for {len(shape)} dimensions", key=ref.key)


def _check_module(tree: Any) -> None:
    for name in _dict(tree):
        text(name)


def _check_optimizer(tree: Any) -> None:
    for part in ("state", "shared", "other", "shapes"):
        _dict(tree[part])
    for name, entry in tree["state"].items():
        text(name)
        _dict(entry)
    for name, shape in tree["shapes"].items():
        text(name)
        _ = [whole(extent) for extent in _list(shape)]
    for group in _list(tree["param_groups"]):
        _ = [text(name) for name in _list(group["params"])]
        _dict(group["options"])
    if tree["on_cpu"] is not None:
        _ = [text(name) for name in _list(tree["on_cpu"])]
    if not all(type(takes) is bool for takes in _dict(tree.get("requires_grad", {})).values()):
        raise TypeError("a parameter takes a gradient or not")


def _check_streams(tree: Any) -> None:
    for name, generator in _dict(tree).items():
        text(name)
        _check_generator(generator)


def _check_generator(tree: Any) -> None:
    text(_dict(tree)["type"])
    for name, value in _named(tree["state"]):
        if name in _POSITIONS:
            whole(value, _POSITIONS[name])


def _check_table(tree: Any) -> None:
    for name in ("dim", "seed", "updates", "count", "shards"):
        whole(tree[name])
    text(tree["rule"])
    finite(tree["spread"])
    _ = [text(name) for name in _list(tree["slots"])]
    _ = [(text(name), finite(value)) for name, value in _dict(tree["options"]).items()]
    if not _list(tree["files"]) or not all(type(ref) is TensorRef for ref in tree["files"]):
        raise TypeError("a table has at least one file")
    _ = [whole(int(ref.key.rpartition("/")[2])) for ref in tree["files"]]


def _named(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield name, item
            yield from _named(item)


def _dict(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"a value of type {type(value).__name__} where names have values")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"a value of type {type(value).__name__} where a list must be")
    return value


class SavedKind(NamedTuple):
    """A kind of group: a check that raises one of MALFORMED for a bad tree.

    `exports`: a file for torch can hold such a group; random streams are useful only to a restore.
    """

    check: Callable[[Any], None] | None = None
    exports: bool = True


# One row for each kind; state/kinds/kinds.py says how live objects are captured and restored.
KINDS = {
    "module": SavedKind(_check_module),
    "optimizer": SavedKind(_check_optimizer),
    "stateful": SavedKind(),
    "generator": SavedKind(_check_generator, exports=False),
    "plain": SavedKind(),
    "table": SavedKind(_check_table),
    RNG: SavedKind(_check_streams, exports=False),
}
