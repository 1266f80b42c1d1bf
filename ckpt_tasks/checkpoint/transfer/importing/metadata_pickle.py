"""The pickle in the `.metadata` of a DCP checkpoint, read without importing or executing anything.

The pickle names classes of torch. Each object becomes a `Pickled`: the class's name, the arguments and the attributes.
A name that DCP's metadata does not use is refused. Keys of dicts are texts, numbers or objects, so hashing is cheap.
"""

from __future__ import annotations

import pickletools
from typing import Any

from ckpt_tasks.checkpoint.transfer.importing.unpickling import MAX_VALUES
from ckpt_tasks.errors import IntegrityError, UnsupportedStateError

_OF_METADATA = (
    "torch.distributed.checkpoint.metadata.",
    "torch.distributed.checkpoint.filesystem.",
    "torch.serialization._get_layout",
    "torch.Size",
    "pathlib.",
)
_DTYPE = "torch."
_PUSHED = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_NEW: dict[str, Any] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
_NEW |= {"NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Pickled:
    """An object of a pickle: the name of its class or function, its arguments, and its attributes."""

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()):
        self.name = name
        self.arguments = arguments
        self.attributes: Any = {}

    def __getitem__(self, name: str) -> Any:
        """Return an attribute; raise KeyError if there is none."""
        return self.attributes[name]


def read_objects(data: bytes) -> Any:
    """Return a pickle's value; raise UnsupportedStateError for a foreign name, IntegrityError for malformed bytes."""
    try:
        return _run(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise IntegrityError(f"the metadata is malformed: {error!r:.200}") from error


def _run(data: bytes) -> Any:
    machine = _Machine()
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if number > 8 * MAX_VALUES:
            raise IntegrityError(f"the metadata has more than {MAX_VALUES} values")
        machine.step(opcode.name, argument)
    return machine.stack.pop()


class _Machine:
    """A stack machine for the opcodes of pickle protocol 4 that DCP writes."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: list[Any] = []

    def step(self, name: str, argument: Any) -> None:
        """Execute one opcode."""
        if name in _PUSHED:
            self.stack.append(argument)
        elif name in _NEW:
            self.stack.append(_NEW[name]())
        elif name == "MEMOIZE":
            self._memo.append(self.stack[-1])
        elif name in {"BINGET", "LONG_BINGET"}:
            self.stack.append(self._memo[argument])
        elif name == "MARK":
            self._outer.append(self.stack)
            self.stack = []
        elif name not in {"PROTO", "FRAME", "STOP"}:
            self._join(name)

    def _join(self, name: str) -> None:
        """Execute an opcode that takes items from the stack."""
        stack = self.stack
        if name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name in {"TUPLE", "APPENDS", "SETITEMS"}:
            self.stack = self._outer.pop()
            _add(self.stack, name, stack)
        elif name == "APPEND":
            stack[-2].append(stack.pop())
        elif name == "SETITEM":
            _add(stack, "SETITEMS", [stack.pop(-2), stack.pop()])
        elif name in {"STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"}:
            last = stack.pop()
            stack[-1] = _made(name, stack[-1], last)
        else:
            raise ValueError(f"the opcode {name}, which DCP does not write")


def _add(stack: list[Any], name: str, items: list[Any]) -> None:
    if name == "TUPLE":
        stack.append(tuple(items))
    elif name == "APPENDS":
        stack[-1].extend(items)
    else:
        if not all(isinstance(key, str | int | Pickled) for key in items[::2]):
            raise ValueError("a key that is neither a text, a number nor an object")
        stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _made(name: str, first: Any, last: Any) -> Any:
    if name == "STACK_GLOBAL":
        full = f"{first}.{last}"
        if not full.startswith(_OF_METADATA) and not (first == "torch" and full.startswith(_DTYPE)):
            raise UnsupportedStateError(f"the metadata names {full:.100}, which is not DCP's")
        return Pickled(full)
    if not isinstance(first, Pickled):
        raise TypeError("an object that has no class")
    if name == "BUILD":
        first.attributes = last
        return first
    if type(last) is not tuple:
        raise TypeError("arguments that are no tuple")
    return last[0] if first.name == "torch.Size" else Pickled(first.name, last)
