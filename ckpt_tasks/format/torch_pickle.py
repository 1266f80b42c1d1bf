"""The pickle of a torch.save file, written without pickle and without torch.

Invariant: it uses only opcodes and names that `torch.load(weights_only=True)` accepts, so that reading the file runs no
code. A value that these cannot express is refused with its path.

Tensors are written as torch does: the number of a storage, which is a separate file in the zip file, with dtype, shape
and strides. Protocol 2, as torch writes it. Source: torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.format.tree import TensorRef, TorchName, Typed

__all__ = ["Storage", "dump"]

_MAX_INT_BYTES = 255
# The dtypes with their own storage class; all others have torch's untyped one.
_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}


class Storage(NamedTuple):
    """The storage of one tensor, in C order: its number, torch's name of the dtype, the shape, and its bytes."""

    number: int
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def dump(value: Any, storage_of: Callable[[str], Storage], path: str = "") -> bytes:
    """Return the pickle of a tree; `storage_of` returns the storage for a tensor's full key, `path` is for errors.

    Raises UnsupportedStateError with the path of the first value that torch would not read.
    """
    parts = [b"\x80\x02"]
    _Writer(parts.append, storage_of).write(value, path)
    return b"".join((*parts, b"."))


class _Writer:
    def __init__(self, put: Callable[[bytes], None], storage_of: Callable[[str], Storage]):
        self._put = put
        self._storage_of = storage_of

    def write(self, value: Any, path: str) -> None:
        writer = _WRITERS.get(type(value))
        if writer is None:
            raise _refusal(f"a value of type {_name(value)}", path)
        writer(self, value, path)

    def call(self, module: str, name: str, *arguments: Any) -> None:
        """Write a call of a function with plain arguments."""
        self.name(module, name)
        self.sequence(b"(", arguments, b"t", "")
        self._put(b"R")

    def name(self, module: str, name: str) -> None:
        self._put(f"c{module}\n{name}\n".encode())

    def sequence(self, begin: bytes, items: Iterable[Any], end: bytes, path: str) -> None:
        self._put(begin)
        for n, item in enumerate(items):
            self.write(item, f"{path}/{n}")
        self._put(end)

    def pairs(self, value: Mapping[Any, Any], path: str) -> None:
        self._put(b"(")
        for key, item in value.items():
            self.write(key, f"{path}/<key {key!r:.60}>")
            self.write(item, f"{path}/{key}" if path else str(key))
        self._put(b"u")

    def plain(self, value: bool | None, path: str) -> None:
        self._put({None: b"N", True: b"\x88", False: b"\x89"}[value])

    def whole(self, value: int, path: str) -> None:
        if -(1 << 31) <= value < 1 << 31:
            self._put(b"J" + struct.pack("<i", value))
            return
        bits = (value if value >= 0 else ~value).bit_length()
        data = value.to_bytes(bits // 8 + 1, "little", signed=True)
        if len(data) > _MAX_INT_BYTES:
            raise _refusal(f"a number of {len(data)} bytes", path)
        self._put(b"\x8a" + bytes([len(data)]) + data)

    def number(self, value: float, path: str) -> None:
        self._put(b"G" + struct.pack(">d", value))

    def text(self, value: str, path: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self._put(b"X" + struct.pack("<I", len(data)) + data)

    def bytes(self, value: bytes, path: str) -> None:
        self.call("_codecs", "encode", value.decode("latin-1"), "latin-1")

    def complex(self, value: complex, path: str) -> None:
        self.call("builtins", "complex", value.real, value.imag)

    def list(self, value: list[Any], path: str) -> None:
        self.sequence(b"](", value, b"e", path)

    def tuple(self, value: tuple[Any, ...], path: str) -> None:
        self.sequence(b"(", value, b"t", path)

    def set(self, value: set[Any], path: str) -> None:
        self.name("builtins", "set")
        self.sequence(b"(](", value, b"etR", path)

    def dict(self, value: dict[Any, Any], path: str) -> None:
        self._put(b"}")
        self.pairs(value, path)

    def ordered(self, value: OrderedDict[Any, Any], path: str) -> None:
        self.call("collections", "OrderedDict")
        self.pairs(value, path)

    def counter(self, value: Counter[Any], path: str) -> None:
        self.name("collections", "Counter")
        self._put(b"(")
        self.dict(value, path)
        self._put(b"tR")

    def torch(self, value: TorchName, path: str) -> None:
        if value.kind == "dtype":
            self.name("torch", str(value.value))
        elif value.kind == "size":
            self.call("torch", "Size", value.value)
        else:
            self.call("torch", "device", value.value)

    def tensor(self, ref: TensorRef, path: str) -> None:
        if ref.array:
            raise _refusal("a NumPy array", path)
        number, dtype, shape, size_bytes = self._storage_of(ref.key)
        kind, elements = _STORAGES.get(dtype), math.prod(shape)
        self.name("torch._utils", "_rebuild_tensor_v2" if kind else "_rebuild_tensor_v3")
        self._put(b"((")
        self.text("storage", path)
        self.name("torch" if kind else "torch.storage", kind or "UntypedStorage")
        for text in (str(number), "cpu"):
            self.text(text, path)
        self.whole(elements if kind else size_bytes, path)
        self._put(b"tQ")
        for argument in (0, shape, _strides(shape), ref.requires_grad):
            self.write(argument, path)
        self.call("collections", "OrderedDict")  # hooks, of which there are none
        if not kind:
            self.name("torch", dtype)
        self._put(b"tR")


_WRITERS: dict[type, Callable[[_Writer, Any, str], None]] = {
    type(None): _Writer.plain,
    bool: _Writer.plain,
    int: _Writer.whole,
    float: _Writer.number,
    str: _Writer.text,
    bytes: _Writer.bytes,
    complex: _Writer.complex,
    list: _Writer.list,
    tuple: _Writer.tuple,
    set: _Writer.set,
    dict: _Writer.dict,
    OrderedDict: _Writer.ordered,
    Counter: _Writer.counter,
    TorchName: _Writer.torch,
    TensorRef: _Writer.tensor,
}


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _name(value: Any) -> str:
    kind = type(value)
    if kind is Typed:
        return f"{value.tag[1:]} {value.head[0]!r:.60}" if value.head else value.tag[1:]
    return "NumPy scalar" if kind.__name__ == "NumpyScalar" else kind.__qualname__


def _refusal(what: str, path: str) -> UnsupportedStateError:
    return UnsupportedStateError(f"{what} cannot be written for torch.load(weights_only=True)", key=path or None)
