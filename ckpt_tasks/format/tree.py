"""Nested state as JSON and back, with exact types.

JSON's own types are written as they are. Every other value is an object with one key that begins with ``~``::

    {"~tensor": "model/embed.weight"}                          a tensor, by its full key
    {"~tensor": ["model/w", {"stride": [1, 8]}]}               … with its strides and flags
    {"~dict": [[key, value], …]}                               a dict whose keys are not all plain strings
    {"~tuple": […]} {"~set": […]} {"~frozenset": […]} {"~deque": [maxlen, […]]}
    {"~odict": [[key, value], …]} {"~counter": [[key, count], …]}
    {"~float": "nan"} {"~complex": [re, im]} {"~bytes": "base64"}
    {"~datetime": iso} {"~date": iso} {"~fold": iso} {"~timedelta": [days, seconds, microseconds]}
    {"~torch": ["dtype", "float32"]} {"~numpy": ["float64", value]} {"~defaultdict": ["list", [[key, value], …]]}
    {"~named": ["module:Class", {field: value, …}]}            and other Typed kinds: the type, and the parts

There is no pickle, and no entry makes a reader import or call anything: KINDS lists all kinds of values. Readers apply
the writer's limits: depth, digits, numbers that fit their dtype, and few keys with equal hashes (Python finds a key
among n with the same hash in n steps, and an attacker can easily make integers with equal hashes).
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import date, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ckpt_tasks.errors import FormatVersionError, IntegrityError, UnsupportedStateError
from ckpt_tasks.format.parsing import MALFORMED, whole

# Real states nest less deep. `encode` refuses a cycle at this depth, far below the interpreter's limit of 1,000 frames.
MAX_DEPTH = 100
MAX_INT_BITS = 10_000  # Python writes at most 4,300 digits.
MAX_OF_ONE_HASH = 64
_WORD = 2**32 - 1  # Lists skip _encode for numbers up to this one: random streams have hundreds.

Json = Any
_Keys = TypeVar("_Keys", bound=Collection[Any])
_AS_THEY_ARE = frozenset({type(None), bool, str})
# The dtypes that a NumPy array or scalar may have, each with the range of its whole numbers or its Python type.
NUMBERS: dict[str, range | type] = {"bool": bool, "complex64": complex, "complex128": complex}
NUMBERS |= {f"int{bits}": range(-(1 << bits - 1), 1 << bits - 1) for bits in (8, 16, 32, 64)}
NUMBERS |= {f"uint{bits}": range(1 << bits) for bits in (8, 16, 32, 64)}
NUMBERS |= {f"float{bits}": float for bits in (16, 32, 64)}


class TensorRef(NamedTuple):
    """A tensor in a tree.

    `key` is the full key "group/name". `array`: the value was a numpy.ndarray. `stride` is in elements; None: the
    tensor was C-contiguous. `requires_grad` is the tensor's flag.
    """

    key: str
    array: bool = False
    stride: tuple[int, ...] | None = None
    requires_grad: bool = False


# Makes a TensorRef from a tuple of four values, without a Python frame: a state may have 10⁵ references.
new_ref: Callable[[tuple[str, bool, tuple[int, ...] | None, bool]], TensorRef] = partial(tuple.__new__, TensorRef)


class Typed(NamedTuple):
    """A value that `value_kinds.py` takes apart: its tag, its type, and its parts, which may be tensors."""

    tag: str
    head: tuple[Any, ...]
    parts: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash((self.tag, repr(self.head), *self.parts.values()))

    def __repr__(self) -> str:
        parts = (f"{name}={part!r}" for name, part in self.parts.items())
        return f"{self.tag[1:]}({', '.join([*map(repr, self.head), *parts])})"


class Kind(NamedTuple):
    """A kind of value: its tag, and the type of its values in a tree.

    `write(value, path, depth)` and `read(body, depth)` convert a value to JSON and back. `form` says what a value
    contains: "pairs" of keys and parts, "items" by position, a "set" of keys, named "parts" (of Typed), or nothing
    ("leaf").
    """

    tag: str
    type: type
    write: Callable[[Any, str, int], Json]
    read: Callable[[Json, int], Any]
    form: str = "leaf"


def encode(value: Any, path: str = "") -> Json:
    """Turn a value into JSON types.

    `path`: the value's path in the state, for the error. Raises UnsupportedStateError with the path of the first value
    whose type is not in KINDS. Subclasses raise, too, so that `decode` returns exactly what was encoded.
    """
    return _encode(value, path, 0)


def decode(node: Json) -> Any:
    """Turn JSON from `encode` back into the value.

    Raises IntegrityError for JSON that `encode` cannot write, FormatVersionError for an unknown tag.
    """
    try:
        return _decode(node, 0)
    except MALFORMED as error:
        raise IntegrityError(f"the state tree is malformed: {error!s:.200}") from error


def children(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return pairs of (key, position or name) and part of a container in a tree; nothing for other values."""
    kind = type(value)
    if kind in SEQUENCES:
        return enumerate(value)
    parts: Mapping[Any, Any] = value if kind in MAPPINGS else value.parts if kind is Typed else {}
    return parts.items()


def is_leaf(value: Any) -> bool:
    """Return True if a value in a tree cannot contain values; an empty container is not a leaf."""
    kind = type(value)
    return kind not in MAPPINGS and kind not in SEQUENCES and not (kind is Typed and value.parts)


def ref_like(model: Any, content: Any) -> Any:
    """Make a container with new contents and the type, bound, factory or class of `model`."""
    kind = type(model)
    return _LIKE[kind](model, content) if kind in _LIKE else kind(content)


def tensor_refs(value: Any) -> list[TensorRef]:
    """Return every TensorRef in a tree, in the tree's order."""
    refs: list[TensorRef] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if kind is TensorRef:
            refs.append(item)
        elif kind in SEQUENCES:
            waiting.extend(reversed(item))
        elif kind in MAPPINGS or (kind is Typed and item.parts):
            waiting.extend(reversed([part for _, part in children(item)]))
    return refs


def words(value: Any, tensors: Mapping[str, tuple[str, tuple[int, ...]]], most: int = 60) -> str:
    """Describe a value of a tree in a few words; `tensors` has each tensor's dtype and shape by full key."""
    if type(value) is TensorRef:
        dtype, shape = tensors[value.key]
        return f"{dtype} {[*shape]}"
    kind = value.tag[1:] if type(value) is Typed else type(value).__name__
    if count := len(dict(children(value))):
        return f"{kind} of {count}"
    text = repr(value) if len(repr(value)) <= most else f"{repr(value)[: most - 1]}…"
    return text if type(value) is Typed else f"{kind} {text}"


def _encode(value: Any, path: str, depth: int) -> Json:
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is int and value.bit_length() <= MAX_INT_BITS):
        return value
    if kind is float and math.isfinite(value):
        return value
    if depth > MAX_DEPTH and kind is not float:
        raise UnsupportedStateError(
            f"the state nests deeper than {MAX_DEPTH} levels", key=path[:200], hint="Is there a cycle in it?"
        )
    if kind is list:
        return _items(value, path, depth)
    if kind is dict and all(type(key) is str and not key.startswith("~") for key in value):
        return {key: _encode(item, f"{path}/{key}", depth + 1) for key, item in value.items()}
    tag, write = _WRITERS.get(value.tag if kind is Typed else kind, ("", None))
    if write is None:
        raise refusal(value, path)
    return {"~fold" if kind is datetime and value.fold else tag: write(value, path, depth)}


def refusal(value: object, path: str, *, nested: bool = False) -> UnsupportedStateError:
    """Return the error for a value of an unknown type; `nested`: the value has a state, and is inside another value."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    hint = "Leave it out of the state, or give its owner a state_dict() of tensors and plain values."
    if nested:
        hint = "Give it a name of its own at the top of the state."
    elif callable(value):
        hint = "Leave it out of the state: code is not stored, the program makes it anew. What it counts can be stored."
    elif hasattr(value, "fileno"):
        hint = "Leave it out of the state, and open it anew. Where it was (tell()) can be stored as a number."
    elif isinstance(value, Iterator):
        hint = "Leave it out of the state: nothing sets an iterator to a position. Use ResumableSampler for batches."
    return UnsupportedStateError(
        f"a value of type {name}{' inside another one' * nested} cannot be stored", key=path or None, hint=hint
    )


def _pairs(value: dict[Any, Any], path: str, depth: int) -> list[list[Json]]:
    _unlike(value, partial(UnsupportedStateError, key=path or None))
    return [
        [_encode(key, f"{path}/<key {key!r:.60}>", depth + 1), _encode(item, f"{path}/{key}", depth + 1)]
        for key, item in value.items()
    ]


def _items(value: Any, path: str, depth: int) -> list[Json]:
    return [
        item if type(item) is int and 0 <= item <= _WORD else _encode(item, f"{path}/{index}", depth + 1)
        for index, item in enumerate(value)
    ]


def _encode_tensor(ref: TensorRef, path: str, depth: int) -> Json:
    how: dict[str, Any] = {}
    if ref.array:
        how["array"] = True
    if ref.stride is not None:
        how["stride"] = list(ref.stride)
    if ref.requires_grad:
        how["requires_grad"] = True
    return [ref.key, how] if how else ref.key


def _encode_time(value: datetime, path: str, depth: int) -> Json:
    iso = value.isoformat()
    # The ISO form has only a fixed offset, not a time zone with rules.
    if repr(datetime.fromisoformat(iso).replace(fold=value.fold)) != repr(value):
        raise UnsupportedStateError(
            f"the time zone of {iso} cannot be stored", key=path or None, hint="Use UTC or another fixed offset."
        )
    return iso


def _encode_default(value: defaultdict[Any, Any], path: str, depth: int) -> Json:
    factory = value.default_factory
    if factory is not None and factory not in _FACTORIES.values():
        hint = f"One of {', '.join(_FACTORIES)} can be stored; a function is code."
        raise UnsupportedStateError("the factory of this defaultdict cannot be stored", key=path or None, hint=hint)
    return [factory and factory.__name__, _pairs(value, path, depth)]


def _encode_typed(value: Typed, path: str, depth: int) -> Json:
    parts = {name: _encode(part, f"{path}/{name}", depth + 1) for name, part in value.parts.items()}
    return [*_items(value.head, path, depth), parts]


def _encode_set(value: Any, path: str, depth: int) -> list[Json]:
    # Sort the items by their JSON, so that equal sets give equal bytes with any hash seed.
    _unlike(value, partial(UnsupportedStateError, key=path or None))
    return sorted(_items(value, path, depth), key=json.dumps)


def _decode(node: Json, depth: int) -> Any:
    if depth > MAX_DEPTH + 2:
        raise ValueError("nested too deep")
    kind = type(node)
    if kind is dict:
        if len(node) == 1:
            if type(key := node.get("~tensor")) is str:
                return new_ref((key, False, None, False))
            ((tag, body),) = node.items()
            if tag.startswith("~"):
                reader = _READERS.get(tag)
                if reader is None:
                    raise FormatVersionError(
                        f"the state tree holds the unknown entry {tag[:40]!r}",
                        hint="A newer version of ckpt-tasks wrote this checkpoint: upgrade to read it.",
                    )
                return reader(body, depth)
        return {key: _decode(item, depth + 1) for key, item in node.items()}
    if kind is list:
        return [_decode(item, depth + 1) for item in node]
    if (kind is int and node.bit_length() > MAX_INT_BITS) or (kind is float and not math.isfinite(node)):
        raise ValueError("a number that is not written so")
    return node


def _read_pairs(body: Json, depth: int) -> list[tuple[Any, Any]]:
    pairs = [(_decode(key, depth + 1), _decode(item, depth + 1)) for key, item in body]
    _unlike([key for key, _ in pairs])
    return pairs


def _unlike(keys: _Keys, error: Callable[[str], Exception] = ValueError) -> _Keys:
    """Return the keys; raise an error if many have the same hash: a dict of n such keys takes n² steps to build."""
    if len(keys) > MAX_OF_ONE_HASH and max(Counter(map(hash, keys)).values()) > MAX_OF_ONE_HASH:
        raise error(f"more than {MAX_OF_ONE_HASH} keys with one hash cannot be stored")
    return keys


def _read_tensor(body: Json, depth: int) -> TensorRef:
    key, how = body
    stride = how.get("stride")
    return TensorRef(
        str(key),
        array=how.get("array") is True,
        stride=None if stride is None else tuple(map(whole, stride)),
        requires_grad=how.get("requires_grad") is True,
    )


def _read_torch(body: Json, depth: int) -> Typed:
    kind, value = body
    if kind not in ("dtype", "device", "size"):
        raise ValueError(f"unknown torch name {kind!r}")
    return Typed("~torch", (kind, [*map(whole, value)] if kind == "size" else str(value)), {})


def _read_numpy(body: Json, depth: int) -> Typed:
    name, value = str(body[0]), _decode(body[1], depth + 1)
    fits = NUMBERS.get(name, type(value))
    if type(value) not in (bool, int, float, complex) or type(value) is not (int if type(fits) is range else fits):
        raise TypeError(f"a value of type {type(value).__name__} is no {name:.40}")
    if type(fits) is range and value not in fits:
        raise ValueError(f"{value!r:.80} is no {name}")
    return Typed("~numpy", (name, value), {})


def _read_all(body: Json, depth: int) -> list[Any]:
    return [_decode(item, depth + 1) for item in body]


def _read_complex(body: Json, depth: int) -> complex:
    real, imaginary = _read_all(body, depth)
    return complex(real, imaginary)


def _read_deque(body: Json, depth: int) -> deque[Any]:
    return deque(_read_all(body[1], depth), body[0])


def _read_default(body: Json, depth: int) -> defaultdict[Any, Any]:
    name, pairs = body
    return defaultdict(None if name is None else _FACTORIES[name], _read_pairs(pairs, depth))


def _read_typed(body: Json, depth: int, tag: str) -> Typed:
    *head, parts = body
    return Typed(tag, tuple(_read_all(head, depth)), {name: _decode(part, depth + 1) for name, part in parts.items()})


_NUMBERS_READ = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# Kinds of values with parts.
_TYPED = [
    *("~named", "~enum", "~array", "~sparse", "~quantized", "~seeds", "~time", "~text", "~path", "~range"),
    *("~bytearray", "~wrapper", "~buffer"),
]
# One row for each kind of value that JSON lacks. state/tensors/value_kinds.py has the live type of each Typed kind.
KINDS = (
    Kind("~tensor", TensorRef, _encode_tensor, _read_tensor),
    Kind("~dict", dict, _pairs, lambda b, d: dict(_read_pairs(b, d)), "pairs"),
    Kind("~odict", OrderedDict, _pairs, lambda b, d: OrderedDict(_read_pairs(b, d)), "pairs"),
    Kind("~counter", Counter, _pairs, lambda b, d: Counter(dict(_read_pairs(b, d))), "pairs"),
    Kind("~tuple", tuple, _items, lambda b, d: tuple(_read_all(b, d)), "items"),
    Kind("~set", set, _encode_set, lambda b, d: set(_unlike(_read_all(b, d))), "set"),
    Kind("~frozenset", frozenset, _encode_set, lambda b, d: frozenset(_unlike(_read_all(b, d))), "set"),
    Kind("~deque", deque, lambda v, p, d: [v.maxlen, _items(v, p, d)], _read_deque, "items"),
    Kind("~bytes", bytes, lambda v, p, d: b64encode(v).decode(), lambda b, d: b64decode(b, validate=True)),
    Kind("~complex", complex, lambda v, p, d: _items((v.real, v.imag), p, d), _read_complex),
    Kind("~float", float, lambda v, p, d: repr(v), lambda b, d: _NUMBERS_READ[b]),
    Kind("~datetime", datetime, _encode_time, lambda b, d: datetime.fromisoformat(b)),
    Kind("~date", date, lambda v, p, d: v.isoformat(), lambda b, d: date.fromisoformat(b)),
    Kind("~timedelta", timedelta, lambda v, p, d: [v.days, v.seconds, v.microseconds], lambda b, d: timedelta(*b)),
    Kind("~torch", Typed, lambda v, p, d: _items(v.head, p, d), _read_torch, "parts"),
    Kind("~numpy", Typed, lambda v, p, d: [v.head[0], _encode(v.head[1], p, d)], _read_numpy, "parts"),
    Kind("~fold", datetime, _encode_time, lambda b, d: datetime.fromisoformat(b).replace(fold=1)),
    Kind("~defaultdict", defaultdict, _encode_default, _read_default, "pairs"),
    *(Kind(tag, Typed, _encode_typed, partial(_read_typed, tag=tag), "parts") for tag in _TYPED),
)
_OF_FORM = {form: tuple(row.type for row in KINDS if row.form == form) for form in ("pairs", "items", "set", "leaf")}
MAPPINGS, SEQUENCES, SETS = _OF_FORM["pairs"], (list, *_OF_FORM["items"]), _OF_FORM["set"]
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, bool, str, tuple, deque, *MAPPINGS[1:3])}
SCALARS = _AS_THEY_ARE.union(_OF_FORM["leaf"], {int}) - {TensorRef}  # A tree has these values unchanged.
_LIKE: dict[type, Callable[[Any, Any], Any]] = {  # A copy keeps the bound, factory or class.
    deque: lambda model, items: deque(items, model.maxlen),
    defaultdict: lambda model, pairs: defaultdict(model.default_factory, pairs),
    Typed: lambda model, parts: model._replace(parts=parts),
}
_WRITERS: dict[Any, Any] = {row.tag if row.type is Typed else row.type: (row.tag, row.write) for row in reversed(KINDS)}
_READERS = {row.tag: row.read for row in KINDS}
