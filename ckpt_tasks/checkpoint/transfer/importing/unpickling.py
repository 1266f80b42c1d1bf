"""Read the pickle of a foreign torch.save file, in time and memory linear in the file.

Invariants

1. Nothing in the pickle is imported or executed: it may only use the names that torch.save writes for tensors and plain
   values.
2. The cost of a step is checked before the step runs. Without this, a key of 500 bytes could take 2⁵⁰ steps to hash,
   since its parts can be shared, and a call of ten bytes could request 10 GiB. (torch's own unpickler allows both.)

Attributes of an OrderedDict are skipped; attributes of other objects are refused.
"""

from __future__ import annotations

import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import _utils
from torch.serialization import StorageType
from torch.storage import TypedStorage

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError

MAX_VALUES = 1 << 21
MAX_DEPTH = 200
_MAX_EQUAL_HASHES = 64
_FREE_STEPS = 64 << 20

_rebuild_parameter: Callable[..., Any] = _utils._rebuild_parameter
# Returns a tensor's storage by its key, its dtype and its number of elements.
StorageOf = Callable[[str, torch.dtype, int], torch.UntypedStorage]


class _Call(NamedTuple):
    """A function that a pickle may call; `types` are the types of its arguments, or None if it makes a tensor."""

    function: Callable[..., Any]
    types: tuple[type, ...] | None = None
    reads: bool = False  # True if the function reads the values of tensors.


def _from_type(call: _Call, kind: object, args: tuple[Any, ...], state: object) -> Any:
    if call.types is not None:
        raise ValueError("it is not a tensor that has a type")
    return call.function(*args)


_NAMED: dict[str, Any] = {
    "collections.OrderedDict": _Call(OrderedDict, ()),
    "collections.Counter": _Call(Counter, (dict,)),
    "builtins.set": _Call(set, (list,)),
    "builtins.bytearray": _Call(bytearray, (bytes,)),
    "builtins.complex": _Call(complex, (float, float)),
    "torch.Size": _Call(torch.Size, (tuple,)),
    "torch.device": _Call(torch.device, (str, int)),
    "_codecs.encode": _Call(lambda text, encoding: text.encode({"latin1": "latin1"}[encoding]), (str, str)),
    "torch.serialization._get_layout": _Call(torch.serialization._get_layout, (str,)),
    "torch._tensor._rebuild_from_type_v2": _Call(_from_type),
    "torch._utils._rebuild_tensor": _Call(_utils._rebuild_tensor),
    "torch._utils._rebuild_tensor_v2": _Call(_utils._rebuild_tensor_v2),
    "torch._utils._rebuild_tensor_v3": _Call(_utils._rebuild_tensor_v3),
    "torch._utils._rebuild_parameter": _Call(_rebuild_parameter),
    "torch._utils._rebuild_parameter_with_state": _Call(lambda *args: _rebuild_parameter(*args[:3])),
    "torch._utils._rebuild_meta_tensor_no_storage": _Call(_utils._rebuild_meta_tensor_no_storage),
    "torch._utils._rebuild_qtensor": _Call(_utils._rebuild_qtensor, reads=True),
    "torch._utils._rebuild_sparse_tensor": _Call(_utils._rebuild_sparse_tensor, reads=True),
    "torch._utils._rebuild_nested_tensor": _Call(_utils._rebuild_nested_tensor, reads=True),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _Call(lambda data, dtype, *_: data.to(dtype)),
    "torch.Tensor": torch.Tensor,  # A pickle names this type as an argument, and does not call it.
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "torch.storage.UntypedStorage": torch.UntypedStorage,
}
_NEW: dict[str, Callable[[], Any]] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_NEW |= {"NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False}
_PLAIN = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
_POPS = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2, "REDUCE": 2, "BINPERSID": 1, "BUILD": 1}
_POPS |= {"PROTO": 0, "STOP": 0}


def unpickle(data: bytes, storage_of: StorageOf, size_bytes: int) -> Any:
    """Return the value of a pickle; the size of its file limits the number of steps.

    Raises UnsupportedStateError with the names that are not allowed, IntegrityError if the pickle needs too many steps,
    and any error of Python or torch if the pickle is malformed.
    """
    names = {str(argument) for opcode, argument, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}
    known = {name: _named(_full(name)) for name in names}
    unknown = sorted(_full(name) for name, value in known.items() if value is None)
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise UnsupportedStateError(
            f"the pickle names {', '.join(unknown[:5])}{more}, and only tensors and plain values are unpickled",
            hint="Where you trust the file, load it and save its state_dicts alone: torch.save({'model': …}, name).",
        )
    machine = _Machine(known, storage_of, size_bytes)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.step(opcode.name, argument)
        return machine.stack.pop()
    finally:
        _utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]


def _full(name: str) -> str:
    module, _, last = name.partition(" ")
    return f"{'builtins' if module == '__builtin__' else module}.{last}"


def _named(name: str) -> Any:
    """Return the object for a name in a pickle; None for a name that torch.save does not write."""
    last = name.removeprefix("torch.")
    value = vars(torch).get(last)
    if isinstance(value, type) and issubclass(value, TypedStorage):
        return StorageType(last)  # type: ignore[no-untyped-call]
    return value if isinstance(value, torch.dtype | torch.qscheme) else _NAMED.get(name)


class _Machine:
    """A stack machine for the opcodes of pickle protocol 2 that torch.save writes."""

    def __init__(self, known: dict[str, Any], storage_of: StorageOf, size_bytes: int):
        self.stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._known = known
        self._storage_of = storage_of
        self._left = 2 * size_bytes + _FREE_STEPS
        self._sizes: dict[int, tuple[int, int]] = {}  # By a tuple's id(): the number of values in it, and its depth.
        self._hashes: Counter[tuple[int, int]] = Counter()  # Counts keys, by the container's id() and the key's hash.

    def step(self, name: str, argument: Any) -> None:
        """Execute one opcode."""
        stack = self.stack
        match name:
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "GLOBAL":
                stack.append(self._known[argument])
            case "SHORT_BINSTRING":
                stack.append(argument.encode("latin1").decode())
            case "MARK":
                self._outer.append(stack)
                self.stack = []
            case "TUPLE" | "APPENDS" | "SETITEMS":
                self.stack = self._outer.pop()
                self._join(name, stack)
            case _ if name in _PLAIN:
                stack.append(argument)
            case _ if name in _NEW:
                stack.append(_NEW[name]())
            case _:
                count = _POPS[name]
                items = stack[len(stack) - count :]
                del stack[len(stack) - count :]
                self._join(name, items)

    def _join(self, name: str, items: list[Any]) -> None:
        """Execute an opcode that takes items from the stack."""
        if name.startswith("TUPLE"):
            self.stack.append(self._tuple(items))
        elif name.startswith(("APPEND", "SETITEM")):
            self._extend(items, is_list=name.startswith("APPEND"))
        elif name == "REDUCE":
            self.stack.append(self._called(*items))
        elif name == "BINPERSID":
            self.stack.append(self._storage(*items[0]))
        # Skip the attributes of an OrderedDict, which are a state_dict's _metadata; refuse all others.
        elif name == "BUILD" and type(self.stack[-1]) is not OrderedDict:
            raise ValueError("it gives attributes to something that has none")

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise IntegrityError("its pickle repeats its values more often than a file of this size may")

    def _tuple(self, items: list[Any]) -> tuple[Any, ...]:
        parts = [self._sizes.get(id(item), (1, 0)) if type(item) is tuple else (1, 0) for item in items]
        size, depth = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
        if size > MAX_VALUES or depth > MAX_DEPTH:
            raise IntegrityError(f"there are more than {MAX_VALUES} values in a tuple, or it is too deep")
        made = tuple(items)
        self._sizes[id(made)] = size, depth
        return made

    def _extend(self, items: list[Any], *, is_list: bool) -> None:
        into = self.stack[-1]
        if type(into) not in ((list,) if is_list else (dict, OrderedDict, Counter)):
            raise ValueError("it adds an item to something that has none")
        if is_list:
            into.extend(items)
        else:
            self._hash(into, items[::2])
            for key, value in zip(items[::2], items[1::2], strict=True):
                into[key] = value

    def _hash(self, into: Any, keys: Iterable[Any]) -> None:
        """Count the steps of hashing each key before the key is hashed; refuse too many keys with equal hashes."""
        for key in keys:
            self._spend(self._sizes.get(id(key), (1, 0))[0] if type(key) is tuple else 1)
            number = hash(key)
            if type(key) is not str and (type(key) is not int or number != key):
                self._hashes[id(into), number] += 1
                if self._hashes[id(into), number] > _MAX_EQUAL_HASHES:
                    raise IntegrityError(f"more than {_MAX_EQUAL_HASHES} keys have one hash")

    def _called(self, call: _Call, args: tuple[Any, ...]) -> Any:
        if call.types is not None:
            if not all(type(arg) is kind for arg, kind in zip(args, (*call.types, None), strict=False)):
                raise ValueError(f"a call with {len(args)} arguments of other types")
            self._spend(sum(len(arg) for arg in args if isinstance(arg, str | bytes | list | tuple | dict)))
            if call.function is set:
                self._hash(args, args[0])
        elif call.reads:
            flat = [part for arg in args for part in (arg if type(arg) is tuple else (arg,))]
            self._spend(sum(part.nbytes for part in flat if isinstance(part, torch.Tensor)))
        return call.function(*args)

    def _storage(self, kind: str, type_: Any, key: str, location: str, elements: int) -> TypedStorage:
        # Check the types: the text of a value of another type could be endless.
        if kind != "storage" or type(key) is not str or type(elements) is not int:
            raise ValueError("it refers to something that is no storage")
        dtype = torch.uint8 if type_ is torch.UntypedStorage else type_.dtype
        storage = self._storage_of(key, dtype, elements)
        return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
