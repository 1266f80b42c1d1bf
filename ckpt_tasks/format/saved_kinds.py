"""The kinds of groups in the format, and checks of a group's tree before a restore uses it.

A restore takes positions, strides, flags and states of random streams from a tree. NumPy would follow a position
outside a stream's numbers and read other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

from msgspec import Meta, convert

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.parsing import Count, Number, declared, text, well_formed, whole
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


class _ParamGroup(TypedDict):
    params: list[str]
    options: dict[Any, Any]


@declared
class _Optimizer(TypedDict):
    state: dict[str, dict[Any, Any]]
    shared: dict[Any, Any]
    other: dict[Any, Any]
    shapes: dict[str, list[Count]]
    param_groups: list[_ParamGroup]
    on_cpu: list[str] | None
    requires_grad: NotRequired[dict[Any, bool]]


@declared
class _Table(TypedDict):
    dim: Count
    seed: Count
    updates: Count
    count: Count
    shards: Count
    rule: str
    spread: Number
    slots: list[str]
    options: dict[str, Number]
    files: Annotated[list[Any], Meta(min_length=1)]


@declared
class _Replay(TypedDict):
    capacity: Count
    added: Count
    columns: list[tuple[str, str, list[Count]]]
    files: list[Any]


def _check_streams(tree: Any) -> None:
    for generator in convert(tree, dict[str, dict[Any, Any]]).values():
        _check_generator(generator)


def _check_generator(tree: Any) -> None:
    text(convert(tree, dict[Any, Any])["type"])
    for name, value in _named(tree["state"]):
        if name in _POSITIONS:
            whole(value, _POSITIONS[name])


def _check_files(files: list[Any]) -> None:
    for ref in files:
        if type(ref) is not TensorRef:
            raise TypeError("a file of rows is not a tensor")
        whole(int(ref.key.rpartition("/")[2]))


def _named(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield name, item
            yield from _named(item)


class SavedKind(NamedTuple):
    """A kind of group: a check that raises one of MALFORMED for a bad tree.

    `exports`: a file for torch can hold such a group; random streams are useful only to a restore.
    """

    check: Callable[[Any], object] | None = None
    exports: bool = True


# One row for each kind; state/kinds/kinds.py says how live objects are captured and restored.
KINDS = {
    "module": SavedKind(lambda tree: convert(tree, dict[str, Any])),
    "optimizer": SavedKind(lambda tree: convert(tree, _Optimizer)),
    "stateful": SavedKind(),
    "generator": SavedKind(_check_generator, exports=False),
    "plain": SavedKind(),
    "table": SavedKind(lambda tree: _check_files(convert(tree, _Table)["files"])),
    "replay": SavedKind(lambda tree: _check_files(convert(tree, _Replay)["files"])),
    RNG: SavedKind(_check_streams, exports=False),
}
