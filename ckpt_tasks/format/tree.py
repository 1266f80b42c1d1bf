"""Turn a nested state into JSON and back, every type exactly as it was.

JSON's own types stand for themselves. Everything else is an object with one key that begins with ``~``::

    {"~tensor": "model/embed.weight"}                          a tensor, by its full key
    {"~tensor": ["model/w", {"stride": [1, 8]}]}               … with what it takes to come back as it was
    {"~dict": [[key, value], …]}                               a dict whose keys are not all plain strings
    {"~tuple": […]} {"~set": […]} {"~frozenset": […]} {"~deque": [maxlen, […]]}
    {"~odict": [[key, value], …]} {"~counter": [[key, count], …]}
    {"~float": "nan"} {"~complex": [re, im]} {"~bytes": "base64"}
    {"~datetime": iso} {"~date": iso} {"~timedelta": [days, seconds, microseconds]}
    {"~torch": ["dtype", "float32"]} {"~numpy": ["float64", value]}

Nothing is pickled and no entry names a class to import: the vocabulary above is closed. A reader has the bounds of the
writer: depth, digits, numbers that fit their dtype, and few keys with equal hashes (Python finds a key among n with the
same hash in n steps, and integers with equal hashes are easily made).
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from ckpt_tasks.errors import FormatVersionError, IntegrityError, UnsupportedStateError
from ckpt_tasks.format.parsing import MALFORMED, whole

__all__ = ["MAX_DEPTH", "NumpyScalar", "TensorRef", "TorchName", "decode", "encode", "new_ref", "tensor_refs"]

MAX_DEPTH = 100  # deeper than any real state; a cycle ends here, far from the interpreter's own limit of 1,000 frames
MAX_INT_BITS = 10_000  # Python writes no more than 4,300 digits
MAX_OF_ONE_HASH = 64
_WORD = 2**32 - 1  # random streams have hundreds of numbers below this, at every save

Json = Any
_AS_THEY_ARE = frozenset({type(None), bool, str})
# NumPy's scalars: the Python type of each one's value, and the range of its whole numbers.
_NUMBERS: dict[str, type] = {"bool": bool, "complex64": complex, "complex128": complex} | {
    f"float{bits}": float for bits in (16, 32, 64)
}
_WHOLE_NUMBERS = {f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)} | {
    f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)
}


class TensorRef(NamedTuple):
    """A tensor in a tree.

    `key` is the full key "group/name". `array`: it was a numpy.ndarray. `stride` is in elements, and None if the tensor
    was C-contiguous. `requires_grad` is the tensor's flag.
    """

    key: str
    array: bool = False
    stride: tuple[int, ...] | None = None
    requires_grad: bool = False


# Makes a TensorRef from four values, without a Python frame for each of 10⁵.
new_ref: Callable[[tuple[str, bool, tuple[int, ...] | None, bool]], TensorRef] = partial(tuple.__new__, TensorRef)


@dataclass(frozen=True, slots=True)
class TorchName:
    """A torch.dtype, torch.device or torch.Size in a tree: `kind` is "dtype", "device" or "size"."""

    kind: str
    value: str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NumpyScalar:
    """A NumPy scalar in a tree: its dtype's name, and its value as a Python bool, int, float or complex."""

    dtype: str
    value: bool | int | float | complex


def encode(value: Any, path: str = "") -> Json:
    """Turn a value into JSON types.

    `path` is the value's place in the state, for the error. Raises UnsupportedStateError with the path of the first
    value outside of the vocabulary; subclasses count as outside, so that `decode` returns exactly what was encoded.
    """
    return _encode(value, path, 0)


def decode(node: Json) -> Any:
    """Turn the result of `encode` back into the value.

    Raises IntegrityError for JSON that `encode` cannot write, FormatVersionError for an unknown word of the vocabulary.
    """
    try:
        return _decode(node, 0)
    except MALFORMED as error:
        raise IntegrityError(f"the state tree is malformed: {error!s:.200}") from error


def tensor_refs(value: Any) -> list[TensorRef]:
    """Return every TensorRef of a tree, in the tree's order."""
    refs: list[TensorRef] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if kind is TensorRef:
            refs.append(item)
        elif kind in _MAPPINGS:
            waiting.extend(reversed(item.values()))
        elif kind in (list, tuple, deque):
            waiting.extend(reversed(item))
    return refs


def _encode(value: Any, path: str, depth: int) -> Json:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is int and value.bit_length() <= MAX_INT_BITS:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"~float": repr(value)}
    if depth > MAX_DEPTH:
        raise UnsupportedStateError(
            f"the state nests deeper than {MAX_DEPTH} levels", key=path[:200], hint="Is there a cycle in it?"
        )
    if kind is dict:
        return _encode_dict(value, path, depth)
    writer = _WRITERS.get(kind)
    if writer is None:
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise UnsupportedStateError(f"a value of type {name} cannot be stored", key=path or None, hint=_instead(value))
    return writer(value, path, depth)


def _instead(value: object) -> str:
    """Return the hint for a value that cannot be stored."""
    if callable(value):
        return "Leave it out of the state: code is not stored, the program makes it anew. What it counts can be stored."
    if hasattr(value, "fileno"):
        return "Leave it out of the state, and open it anew. Where it was (tell()) can be stored as a number."
    if isinstance(value, Iterator):
        return "Leave it out of the state: nothing sets an iterator to a position. Use ResumableSampler for batches."
    return "Leave it out of the state, or give its owner a state_dict() of tensors and plain values."


def _encode_dict(value: dict[Any, Any], path: str, depth: int) -> Json:
    if all(type(key) is str and not key.startswith("~") for key in value):
        return {key: _encode(item, f"{path}/{key}", depth + 1) for key, item in value.items()}
    return {"~dict": _pairs(value, path, depth)}


def _pairs(value: dict[Any, Any], path: str, depth: int) -> list[list[Json]]:
    _refuse_alike(value, path)
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
    return {"~tensor": [ref.key, how] if how else ref.key}


def _iso(value: datetime, path: str) -> str:
    text = value.isoformat()
    if repr(datetime.fromisoformat(text)) != repr(value):  # a time zone with rules, or an ambiguous hour
        raise UnsupportedStateError(
            f"the time zone of {text} cannot be stored", key=path or None, hint="Use UTC or another fixed offset."
        )
    return text


def _encode_set(value: Any, path: str, depth: int) -> list[Json]:
    # Sorted in written form, so that equal sets give equal bytes whatever the hash seed.
    _refuse_alike(value, path)
    return sorted(_items(value, path, depth), key=json.dumps)


def _refuse_alike(keys: Collection[Any], path: str) -> None:
    if _alike(keys):
        raise UnsupportedStateError(
            f"more than {MAX_OF_ONE_HASH} keys with one hash cannot be stored", key=path or None
        )


def _alike(keys: Collection[Any]) -> bool:
    """Say whether many keys have the same hash: putting n of them into a dict takes n² steps."""
    return len(keys) > MAX_OF_ONE_HASH and max(Counter(map(hash, keys)).values()) > MAX_OF_ONE_HASH


_WRITERS: dict[type, Callable[[Any, str, int], Json]] = {
    list: _items,
    tuple: lambda v, p, d: {"~tuple": _items(v, p, d)},
    OrderedDict: lambda v, p, d: {"~odict": _pairs(v, p, d)},
    Counter: lambda v, p, d: {"~counter": _pairs(v, p, d)},
    set: lambda v, p, d: {"~set": _encode_set(v, p, d)},
    frozenset: lambda v, p, d: {"~frozenset": _encode_set(v, p, d)},
    deque: lambda v, p, d: {"~deque": [v.maxlen, _items(v, p, d)]},
    bytes: lambda v, p, d: {"~bytes": base64.b64encode(v).decode("ascii")},
    complex: lambda v, p, d: {"~complex": [_encode(v.real, p, d), _encode(v.imag, p, d)]},
    datetime: lambda v, p, d: {"~datetime": _iso(v, p)},
    date: lambda v, p, d: {"~date": v.isoformat()},
    timedelta: lambda v, p, d: {"~timedelta": [v.days, v.seconds, v.microseconds]},
    TensorRef: _encode_tensor,
    TorchName: lambda v, p, d: {"~torch": [v.kind, list(v.value) if v.kind == "size" else v.value]},
    NumpyScalar: lambda v, p, d: {"~numpy": [v.dtype, _encode(v.value, p, d)]},
}
_MAPPINGS = (dict, OrderedDict, Counter)


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


def _unlike(keys: list[Any]) -> list[Any]:
    if _alike(keys):
        raise ValueError(f"more than {MAX_OF_ONE_HASH} keys with one hash")
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


def _read_float(body: Json, depth: int) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[body]


def _read_torch(body: Json, depth: int) -> TorchName:
    kind, value = body
    if kind not in ("dtype", "device", "size"):
        raise ValueError(f"unknown torch name {kind!r}")
    return TorchName(kind, tuple(map(whole, value)) if kind == "size" else str(value))


def _read_numpy(body: Json, depth: int) -> NumpyScalar:
    dtype = str(body[0])
    value: Any = _decode(body[1], depth + 1)
    least, most = _WHOLE_NUMBERS.get(dtype, (0, 0))
    kind = int if dtype in _WHOLE_NUMBERS else _NUMBERS.get(dtype, type(value))
    if type(value) not in (bool, int, float, complex) or type(value) is not kind:
        raise TypeError(f"a value of type {type(value).__name__} is no {dtype:.40}")
    if type(value) is int and dtype in _WHOLE_NUMBERS and not least <= value <= most:
        raise ValueError(f"{value!r:.80} is no {dtype}")
    number: bool | int | float | complex = value  # type: ignore[assignment]  # seen above, by its exact type
    return NumpyScalar(dtype, number)


def _read_items(body: Json, depth: int) -> list[Any]:
    return [_decode(item, depth + 1) for item in body]


_READERS: dict[str, Callable[[Json, int], Any]] = {
    "~tensor": _read_tensor,
    "~dict": lambda b, d: dict(_read_pairs(b, d)),
    "~odict": lambda b, d: OrderedDict(_read_pairs(b, d)),
    "~counter": lambda b, d: Counter(dict(_read_pairs(b, d))),
    "~tuple": lambda b, d: tuple(_read_items(b, d)),
    "~set": lambda b, d: set(_unlike(_read_items(b, d))),
    "~frozenset": lambda b, d: frozenset(_unlike(_read_items(b, d))),
    "~deque": lambda b, d: deque(_read_items(b[1], d), b[0]),
    "~bytes": lambda b, d: base64.b64decode(b, validate=True),
    "~complex": lambda b, d: complex(_decode(b[0], d + 1), _decode(b[1], d + 1)),
    "~float": _read_float,
    "~datetime": lambda b, d: datetime.fromisoformat(b),
    "~date": lambda b, d: date.fromisoformat(b),
    "~timedelta": lambda b, d: timedelta(*b),
    "~torch": _read_torch,
    "~numpy": _read_numpy,
}
