"""Values that a tree holds in parts (Typed in format/tree.py); each row of KINDS takes a kind apart and rebuilds it.

A checkpoint has only the name of the class of a named tuple or an Enum, and a restore never imports it. A restore uses
the class of the value that it replaces, or else the class of that name in a module that the program has imported. The
class must still fit: a named tuple with these fields, or an Enum with these members. No code of the class runs.
"""

from __future__ import annotations

import io
import operator
import sys
from collections.abc import Callable
from enum import Enum, EnumMeta, Flag
from functools import lru_cache, reduce
from math import prod
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt_tasks.errors import IntegrityError, StateMismatchError, UnsupportedStateError
from ckpt_tasks.format.parsing import MALFORMED, text, whole
from ckpt_tasks.format.tree import NUMBERS, Typed

_PATHS: dict[str, type[PurePath]] = {
    "PosixPath": Path,
    "WindowsPath": Path,
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
}
_OF_ROWS, _OF_COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
# The parts of a sparse tensor besides its values.
_INDICES = {
    torch.sparse_coo: ("_indices",),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _OF_ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _OF_COLUMNS),
}
_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32)
_MOST_POOL = 1024
# Classes of tensors that consist of the tensors from `__tensor_flatten__`: torchao's moments of few bits.
_WRAPPERS = {f"torchao.optim.subclass_{bits.lower()}:OptimState{bits}" for bits in ("4bit", "8bit", "Fp8")}
_OF_TORCH: dict[str, Any] = {"device": torch.device, "size": torch.Size}
_OF_NUMPY = {name: np.dtype(name).type for name in NUMBERS}

Head = tuple[Any, ...]
Taken = tuple[Head, dict[str, Any]]


class ValueKind(NamedTuple):
    """A kind of value: `take` splits it into a description and live parts, `build` makes it from a tree and parts.

    `types` are its exact types; `has` recognises a value of a kind with many types. `place`: the parts share the
    value's memory or items, so a restore can write into them. `reads`: `build` needs the values of the parts, so they
    are read first. `key`: a value can be a key of a dict or an element of a set.
    """

    take: Callable[[Any], Taken]
    build: Callable[[Head, dict[str, Any], Any], Any]
    types: tuple[type, ...] = ()
    has: Callable[[Any], bool] | None = None
    place: bool = False
    reads: bool = False
    key: bool = False


def kind_of_value(value: Any) -> str | None:
    """Return the tag of a value's kind in KINDS; None if it has no kind."""
    tag = _TAGS.get(type(value))
    return tag or next((tag for tag, has in _FAMILIES if has(value)), None)


def build(tree: Typed, parts: dict[str, Any], live: Any) -> Any:
    """Rebuild a value from its parts; raise IntegrityError if they do not fit, StateMismatchError without its class."""
    try:
        return KINDS[tree.tag].build(tree.head, parts, live)
    except (*MALFORMED, RuntimeError) as error:
        raise IntegrityError(f"the state tree holds a malformed {tree.tag}: {error!s:.200}") from error


def _imported(name: str) -> Any:
    """Return the object "module:Class" if its module is imported, else None; run no code of the module."""
    module, _, path = name.partition(":")
    home: Any = sys.modules.get(module)
    for part in path.split("."):
        home = home.__dict__.get(part) if isinstance(home, (ModuleType, type)) else None
    return home


def _fits(kind: Any, names: tuple[str, ...], *, enum: bool) -> bool:
    if enum:
        return isinstance(kind, EnumMeta) and kind.__members__.keys() >= {*names}
    return isinstance(kind, type) and issubclass(kind, tuple) and getattr(kind, "_fields", None) == names


@lru_cache(256)
def _name_of(kind: Any) -> str:
    """Name a class so that a restore finds it; raise UnsupportedStateError if a restore could not find it."""
    name, enum = f"{kind.__module__}:{kind.__qualname__}", isinstance(kind, EnumMeta)
    if not _fits(_imported(name), (*kind.__members__,) if enum else kind._fields, enum=enum):
        hint = "Define the class at the top of a module, under its own name: a restore looks for it there."
        raise UnsupportedStateError(f"a value of the local class {kind.__qualname__} cannot be stored", hint=hint)
    return name


def _class(name: str, live: Any, names: tuple[str, ...], *, enum: bool) -> Any:
    own = type(live) if type(live).__qualname__ == name.partition(":")[2] else None
    for kind in (own, _imported(name)):
        if _fits(kind, names, enum=enum):
            return kind
    raise StateMismatchError(
        f"the checkpoint holds a value of the class {name} with {', '.join(names) or 'nothing'} in it, and this "
        "program has no such class",
        hint="Import its module before the restore, and keep its fields or members.",
    )


def _take_named(value: Any) -> Taken:
    if getattr(value, "__dict__", None):
        hint = "Keep them in fields, or give its owner a state_dict()."
        raise UnsupportedStateError("a named tuple with attributes of its own cannot be stored", hint=hint)
    kind: Any = type(value)
    return (_name_of(kind),), dict(zip(value._fields, value, strict=True))


def _build_named(head: Head, parts: dict[str, Any], live: Any) -> Any:
    return tuple.__new__(_class(text(*head), live, (*parts,), enum=False), parts.values())


def _take_enum(value: Enum) -> Taken:
    names = [str(one.name) for one in value] if isinstance(value, Flag) else [value.name]
    kind: Any = type(value)
    taken = (_name_of(kind), *names)
    if _build_enum(taken, {}, value) != value:
        raise UnsupportedStateError(
            f"{value!r} is none of its class's members, and cannot be stored", hint="Store its value."
        )
    return taken, {}


def _build_enum(head: Head, parts: dict[str, Any], live: Any) -> Any:
    kind = _class(text(head[0]), live, head[1:], enum=True)
    members = [kind.__members__[name] for name in head[1:]]
    return reduce(operator.or_, members) if members else kind(0)


def _take_array(array: np.ndarray[Any, Any]) -> Taken:
    if array.dtype.hasobject or array.dtype.kind == "T":
        hint = "Arrays of numbers, of texts of a fixed length, and of fields of these can be stored."
        raise UnsupportedStateError(f"an array of dtype {array.dtype} cannot be stored", hint=hint)
    flat = np.ascontiguousarray(array).reshape(-1)
    held = flat.view(np.uint8) if array.dtype.itemsize else np.empty(0, np.uint8)
    return (np.lib.format.dtype_to_descr(array.dtype), [*array.shape]), {"bytes": held}


def _build_array(head: Head, parts: dict[str, Any], live: Any) -> Any:
    dtype, shape = np.lib.format.descr_to_dtype(head[0]), [whole(extent) for extent in head[1]]
    if dtype.hasobject or parts["bytes"].dtype != np.uint8 or parts["bytes"].size != dtype.itemsize * prod(shape):
        raise ValueError(f"{parts['bytes'].size} bytes are no array {shape} of {dtype}")
    return np.ndarray(shape, dtype, buffer=parts["bytes"])


def _build_buffer(head: Head, parts: dict[str, Any], live: Any) -> io.BytesIO:
    if parts["bytes"].dtype != np.uint8:
        raise TypeError("no bytes")
    made = io.BytesIO(parts["bytes"].tobytes())
    made.seek(whole(*head))
    return made


def _take_sparse(tensor: torch.Tensor) -> Taken:
    if tensor.requires_grad and not tensor.is_leaf:
        raise UnsupportedStateError("a tensor with an autograd history cannot be stored", hint="Store tensor.detach().")
    plain, is_coo = tensor.detach(), tensor.layout is torch.sparse_coo
    head = (str(tensor.layout), [*tensor.shape], is_coo and tensor.is_coalesced(), tensor.requires_grad)
    names = (*_INDICES[tensor.layout], "_values" if is_coo else "values")
    return head, {name.strip("_"): getattr(plain, name)() for name in names}


def _build_sparse(head: Head, parts: dict[str, Any], live: Any) -> Any:
    name, size, coalesced, requires_grad = head
    layout = {str(one): one for one in _INDICES}[name]
    if layout is torch.sparse_coo:
        indices, values = parts.values()
        made = torch.sparse_coo_tensor(indices, values, size, is_coalesced=coalesced, check_invariants=True)
    else:
        rows, columns, values = parts.values()
        made = torch.sparse_compressed_tensor(rows, columns, values, size, layout=layout, check_invariants=True)
    return _beside(made, live).requires_grad_(requires_grad)


def _beside(made: torch.Tensor, live: Any) -> torch.Tensor:
    return made.to(live.device) if isinstance(live, torch.Tensor) else made


def _take_quantized(tensor: torch.Tensor) -> Taken:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return (tensor.q_scale(), tensor.q_zero_point()), {"values": tensor.int_repr()}
    of_channels = {"scales": tensor.q_per_channel_scales(), "zero_points": tensor.q_per_channel_zero_points()}
    return (tensor.q_per_channel_axis(),), {"values": tensor.int_repr(), **of_channels}


def _build_quantized(head: Head, parts: dict[str, Any], live: Any) -> Any:
    values, *of_channels = parts.values()
    if of_channels:
        made = torch._make_per_channel_quantized_tensor(values, *of_channels, *head)
    else:
        made = torch._make_per_tensor_quantized_tensor(values, *head)
    return _beside(made, live)


def _take_wrapper(tensor: Any) -> Taken:
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    return (_path_of(type(tensor)),), {**parts, "": [*context]}


def _build_wrapper(head: Head, parts: dict[str, Any], live: Any) -> Any:
    (path,) = head
    if path not in _WRAPPERS:
        raise ValueError(f"{path!r:.80} is no class of such tensors")
    if (kind := _imported(path)) is None:
        raise StateMismatchError(
            f"the checkpoint has tensors of {path.replace(':', '.')}, and this program has not imported that class",
            hint="Make the optimizer that keeps such tensors before the restore.",
        )
    try:
        return kind.__tensor_unflatten__(parts, parts.pop(""))
    except AssertionError as error:  # The constructor checks the parts' dtypes.
        raise ValueError(f"no {kind.__name__}") from error


def _path_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _take_torch(value: Any) -> Taken:
    kind = "size" if type(value) is torch.Size else type(value).__name__
    return (kind, [*value] if kind == "size" else str(value).removeprefix("torch.")), {}


def _build_torch(head: Head, parts: dict[str, Any], live: Any) -> Any:
    kind, value = head
    made = getattr(torch, text(value), None) if kind == "dtype" else _OF_TORCH[kind](value)
    if type(made).__name__.lower() != kind:
        raise TypeError(f"torch has no {kind} {value!r:.80}")
    return made


def _build_time(head: Head, parts: dict[str, Any], live: Any) -> Any:
    dtype, value = np.dtype(text(head[0])), np.int64(head[1])
    if dtype.kind not in "mM":
        raise TypeError(f"{dtype} is no time")
    return value.view(dtype)


def _take_seeds(seeds: np.random.SeedSequence) -> Taken:
    entropy: Any = seeds.entropy
    entropy = entropy if entropy is None or isinstance(entropy, int) else [*map(int, entropy)]
    return (entropy, [*map(int, seeds.spawn_key)], seeds.pool_size, seeds.n_children_spawned), {}


def _build_seeds(head: Head, parts: dict[str, Any], live: Any) -> Any:
    entropy, spawn_key, pool_size, children = head
    spawned = {"spawn_key": spawn_key, "pool_size": whole(pool_size, _MOST_POOL), "n_children_spawned": children}
    return np.random.SeedSequence(entropy, **spawned)


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def _is_sparse(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout in _INDICES and value.dtype not in _QUANTIZED


def _is_quantized(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _QUANTIZED


def _is_wrapper(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and _path_of(type(value)) in _WRAPPERS


# One row for each kind, in the order in which `has` is called; format/tree.py has the tag.
KINDS = {
    "~quantized": ValueKind(_take_quantized, _build_quantized, has=_is_quantized, reads=True),
    "~sparse": ValueKind(_take_sparse, _build_sparse, has=_is_sparse, reads=True),
    "~wrapper": ValueKind(_take_wrapper, _build_wrapper, has=_is_wrapper),
    "~named": ValueKind(_take_named, _build_named, has=_is_named, place=True, key=True),
    "~enum": ValueKind(_take_enum, _build_enum, has=lambda v: isinstance(type(v), EnumMeta), key=True),
    "~torch": ValueKind(_take_torch, _build_torch, (torch.dtype, torch.device, torch.Size), key=True),
    "~numpy": ValueKind(
        *(lambda v: ((v.dtype.name, v.item()), {}), lambda h, p, _: _OF_NUMPY[h[0]](h[1]), (*_OF_NUMPY.values(),)),
        has=lambda v: isinstance(v, np.generic) and v.dtype.name in NUMBERS,
        key=True,
    ),
    "~time": ValueKind(
        lambda v: ((v.dtype.str, int(v.astype(np.int64))), {}), _build_time, (np.datetime64, np.timedelta64), key=True
    ),
    "~array": ValueKind(_take_array, _build_array, (np.ndarray,), place=True),
    "~seeds": ValueKind(_take_seeds, _build_seeds, (np.random.SeedSequence,)),
    "~path": ValueKind(
        lambda v: ((type(v).__name__, str(v)), {}),
        lambda h, p, _: _PATHS[h[0]](text(h[1])),
        (type(Path()), PurePosixPath, PureWindowsPath),
        key=True,
    ),
    "~range": ValueKind(lambda v: ((v.start, v.stop, v.step), {}), lambda h, p, _: range(*h), (range,)),
    "~bytearray": ValueKind(lambda v: ((bytes(v),), {}), lambda h, p, _: bytearray(*h), (bytearray,)),
    "~buffer": ValueKind(
        lambda v: ((v.tell(),), {"bytes": np.frombuffer(bytearray(v.getvalue()), np.uint8)}),
        *(_build_buffer, (io.BytesIO,)),
        reads=True,
    ),
    "~text": ValueKind(lambda v: (("".join(v),), {}), lambda h, p, _: np.str_(text(*h)), (np.str_,), key=True),
}
_TAGS = {kind: tag for tag, row in KINDS.items() for kind in row.types}
_FAMILIES = tuple((tag, row.has) for tag, row in KINDS.items() if row.has is not None)
