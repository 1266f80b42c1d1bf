"""Compare two checkpoints bit for bit: the trees of their groups, and the tensors that the trees name.

Two plain values are equal if their types and values are equal. Two tensors are equal if every bit (NaN payloads, the
sign of zero), dtype, shape, memory layout and requires_grad are equal, and if the same paths share the tensor. The
comparison ignores the order of the keys of a plain dict, the step, metrics, and how tensors are cut into files.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tasks.checkpoint.transfer.distances import Regions, distances
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.keys import key_of_rank
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.format.tree import SEQUENCES, TensorRef, Typed, children, encode, is_leaf, ref_like, words
from ckpt_tasks.run.opening import Opened, open_checkpoint
from ckpt_tasks.storage.port import Store

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.transfer.distance import Distance


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference between the states of two checkpoints.

    `place` is the path in the state. `what` is the kind of difference: "values", "dtype", "shape", "layout",
    "requires_grad" or "sharing" of a tensor, a plain "value", the "type" of a tensor or value, the "order" or "length"
    of a container, a group's "kind", or "only in A", "only in B". `a` and `b` show both sides briefly. For "values",
    `differing` of `elements` differ: `unmeasured` of them are not numbers, all others differ by at most `max_abs`.
    """

    place: str
    what: str
    a: str
    b: str
    elements: int | None = None
    differing: int | None = None
    unmeasured: int = 0
    max_abs: float | None = None


@dataclass(frozen=True)
class Compared:
    """The number of compared tensors and plain values of one group."""

    tensors: int = 0
    values: int = 0


@dataclass(frozen=True)
class Comparison:
    """The counts of compared values by group, and all differences in the order of the state ("sharing" comes last)."""

    groups: Mapping[str, Compared]
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether the states are equal bit for bit."""
        return not self.differences


class _Pair(NamedTuple):
    """A place in the state where both sides have a tensor."""

    place: str
    a: TensorRef
    b: TensorRef


def compare_checkpoints(
    store_a: Store,
    checkpoint_a: Checkpoint,
    store_b: Store,
    checkpoint_b: Checkpoint,
    *,
    groups: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> Comparison:
    """Compare the groups of two checkpoints, of one run or of two: `groups` (empty: all groups), except `ignore`.

    Reads both checkpoints with about 100 MiB of memory. Raises ConfigError if neither checkpoint has a named group, or
    if no group is left, IntegrityError if a checkpoint is damaged, and StoreError if a read fails.
    """
    a, b = open_checkpoint(store_a, checkpoint_a), open_checkpoint(store_b, checkpoint_b)
    walk = _Walk(a, b)
    for group in _chosen([*dict.fromkeys([*a.groups, *b.groups])], [*groups], [*ignore]):
        walk.group(group)
    pairs = [item for item in walk.findings if isinstance(item, _Pair)]
    apart = distances(Regions(store_a, a), Regions(store_b, b), ((pair.a.key, pair.b.key) for pair in pairs))
    differences: list[Difference] = []
    for item in walk.findings:
        if isinstance(item, Difference):
            differences.append(item)
        elif far := apart.get((item.a.key, item.b.key)):
            differences.append(_apart_in_values(item, far, a))
    return Comparison(walk.compared, (*differences, *_sharing(pairs)))


def _chosen(there: Sequence[str], groups: Sequence[str], ignore: Sequence[str]) -> list[str]:
    hint = f"There are {', '.join(there)}."
    for name in (*groups, *ignore):
        if name not in there:
            raise ConfigError(f"neither checkpoint has a group {name!r:.80}", hint=hint)
    chosen = [name for name in there if (not groups or name in groups) and name not in ignore]
    if not chosen:
        raise ConfigError("no group is left to compare", hint=hint)
    return chosen


class _Walk:
    """Compares the trees of two states; collects differences, and pairs of tensors to compare, in the state's order."""

    def __init__(self, a: Opened, b: Opened):
        self.findings: list[Difference | _Pair] = []
        self.compared: dict[str, Compared] = {}
        self._a = a
        self._b = b
        self._counts = Counter[str]()

    def group(self, name: str) -> None:
        """Compare one group of both states."""
        a, b = self._a.groups.get(name), self._b.groups.get(name)
        self._counts.clear()
        if a and b and a.kind != b.kind:
            self._differ(name, "kind", a.kind, b.kind)
        else:
            self._trees(name, a.trees if a else (), b.trees if b else ())
            self._compare_buffers(name)
        self.compared[name] = Compared(self._counts["tensors"], self._counts["values"])

    def _trees(self, name: str, a: Sequence[Any], b: Sequence[Any]) -> None:
        """Compare a group's trees: one for each rank, or one that all ranks share."""
        for rank in range(max(len(a), len(b))):
            place = f"{name}/{rank:05d}" if len(a) > 1 or len(b) > 1 else name
            if rank >= len(a):
                self._only_in("B", place, b[rank])
            elif rank >= len(b):
                self._only_in("A", place, a[rank])
            else:
                self._values(place, a[rank], b[rank])

    def _compare_buffers(self, name: str) -> None:
        """Compare the buffers of all ranks except rank 0, if both checkpoints have the same world size."""
        ranks = self._a.manifest.world_size if self._a.manifest.world_size == self._b.manifest.world_size else 1
        for key in sorted(self._a.manifest.buffers & self._b.manifest.buffers) if ranks > 1 else ():
            for own in (key_of_rank(key, rank) for rank in range(1, ranks) if key.startswith(f"{name}/")):
                self._values(own, TensorRef(own), TensorRef(own))

    def _values(self, place: str, a: Any, b: Any) -> None:
        kind = type(a)
        if kind is not type(b) or (kind is Typed and a.tag != b.tag):
            self._count(a)
            self._differ(place, "type", words(a, self._a.tensors), words(b, self._b.tensors))
        elif kind is TensorRef:
            self._count(a)
            self._tensors(_Pair(place, a, b))
        elif is_leaf(a) and is_leaf(b):
            self._count(a)
            if _exact(a) != _exact(b):
                self._differ(place, "value", _short(a), _short(b), max_abs=_apart(a, b))
        else:
            bare_a, bare_b = ref_like(a, {}), ref_like(b, {})
            if repr(bare_a) != repr(bare_b):
                self._differ(place, "value", _short(bare_a), _short(bare_b))
            self._parts(place, a, b)

    def _parts(self, place: str, a: Any, b: Any) -> None:
        """Compare containers of one kind: the values at equal keys or positions."""
        by_position = type(a) in SEQUENCES
        name: Callable[[Any], Any] = int if by_position else _exact
        in_a, in_b = ({name(key): (f"{place}/{_part(key)}", v) for key, v in children(side)} for side in (a, b))
        for key in dict.fromkeys([*in_a, *in_b]):
            if key in in_a and key in in_b:
                self._values(*in_a[key], in_b[key][1])
            elif not by_position:
                self._only_in(*("A", *in_a[key]) if key in in_a else ("B", *in_b[key]))
        if by_position and len(a) != len(b):
            self._differ(place, "length", str(len(a)), str(len(b)))
        if type(a) is OrderedDict and in_a.keys() == in_b.keys() and [*in_a] != [*in_b]:
            self._differ(place, "order", _short([*a]), _short([*b]))

    def _tensors(self, pair: _Pair) -> None:
        place, ref_a, ref_b = pair
        (dtype_a, shape_a), (dtype_b, shape_b) = self._a.tensors[ref_a.key], self._b.tensors[ref_b.key]
        for what, a, b in (
            ("shape", _numbers(shape_a), _numbers(shape_b)),
            ("dtype", dtype_a, dtype_b),
            ("layout", _layout(ref_a), _layout(ref_b)),
            ("requires_grad", str(ref_a.requires_grad), str(ref_b.requires_grad)),
            ("type", _kind(ref_a), _kind(ref_b)),
        ):
            if a != b:
                self._differ(place, what, a, b)
        if (dtype_a, shape_a) == (dtype_b, shape_b):
            self.findings.append(pair)

    def _only_in(self, side: str, place: str, value: Any) -> None:
        self._count(value)
        text = words(value, (self._a if side == "A" else self._b).tensors)
        self._differ(place, f"only in {side}", text if side == "A" else "", text if side == "B" else "")

    def _differ(self, place: str, what: str, a: str, b: str, *, max_abs: float | None = None) -> None:
        self.findings.append(Difference(place=place, what=what, a=a, b=b, max_abs=max_abs))

    def _count(self, value: Any) -> None:
        if is_leaf(value):
            self._counts["tensors" if type(value) is TensorRef else "values"] += 1
        for _, below in children(value):
            self._count(below)


def _apart_in_values(pair: _Pair, far: Distance, opened: Opened) -> Difference:
    text = words(pair.a, opened.tensors)
    return Difference(
        place=pair.place,
        what="values",
        a=text,
        b=text,
        elements=math.prod(opened.tensors[pair.a.key][1]),
        differing=far.differing,
        unmeasured=far.unmeasured,
        max_abs=far.max_abs,
    )


def _sharing(pairs: Sequence[_Pair]) -> Iterator[Difference]:
    """Yield a difference for each path whose tensor is shared with different paths in A and in B."""
    first_a: dict[str, str] = {}
    first_b: dict[str, str] = {}
    for pair in pairs:
        with_a = first_a.setdefault(pair.a.key, pair.place)
        with_b = first_b.setdefault(pair.b.key, pair.place)
        if with_a != with_b:
            sides = ["its own" if other == pair.place else f"shared with {other}" for other in (with_a, with_b)]
            yield Difference(place=pair.place, what="sharing", a=sides[0], b=sides[1])


def _exact(value: Any) -> str:
    # As texts, 1, 1.0 and True differ, 0.0 and -0.0 differ, and NaN equals NaN.
    return json.dumps(encode(value))


def _apart(a: Any, b: Any) -> float | None:
    if type(a) not in (int, float):
        return None
    apart: float = abs(a - b)
    return None if isinstance(apart, float) and math.isnan(apart) else apart


def _part(key: Any) -> str:
    return key if type(key) is str else repr(key)


def _short(value: Any, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _numbers(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _layout(ref: TensorRef) -> str:
    return "contiguous" if ref.stride is None else f"strides {_numbers(ref.stride)}"


def _kind(ref: TensorRef) -> str:
    return "numpy array" if ref.array else "tensor"
