"""Random streams as groups: the process's own streams, which a restore sets last, and the user's generators."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.format.saved_kinds import RNG
from ckpt_tasks.state.kinds.differences import Differences
from ckpt_tasks.state.kinds.group_parts import Guard
from ckpt_tasks.state.tensors.packing import pack, unpack
from ckpt_tasks.state.tensors.random_streams import (
    generator_type,
    process_streams,
    scratch_generator,
    set_stream,
    stream_state,
)
from ckpt_tasks.state.tensors.tensor_sources import Maker
from ckpt_tasks.state.tensors.tensors import TensorSet


def capture_streams(streams: Mapping[str, tuple[Any, Any]], tensors: TensorSet) -> dict[str, Any]:
    """Turn the result of current_streams() into a tree with the keys python, numpy, torch, cuda:0 and so on."""
    return {name: _tree(*taken, f"{RNG}/{name}", tensors) for name, taken in streams.items()}


def capture_generator(generator: Any, path: str, tensors: TensorSet) -> dict[str, Any]:
    """Turn a generator into a tree; raise UnsupportedStateError if it has no state (SystemRandom)."""
    try:
        return _tree(generator, stream_state(generator), path, tensors)
    except NotImplementedError as error:
        kind = type(generator).__qualname__
        raise UnsupportedStateError(f"a generator of type {kind} has no state to store", key=path) from error


def _tree(generator: Any, state: Any, path: str, tensors: TensorSet) -> dict[str, Any]:
    return {"type": generator_type(generator), "state": pack(state, path, tensors)}


class GeneratorPart:
    """Restores one random generator."""

    guard: Guard | None = None

    def __init__(self, generator: Any, path: str, tree: Any):
        self._generator = generator
        self._path = path
        self._tree = tree
        self._value: Any = None
        if type(tree) is not dict or not {"type", "state"} <= tree.keys():
            raise IntegrityError("the generator's tree is malformed", key=path)

    def compare(self, differences: Differences) -> None:
        """Record a difference if the checkpoint's generator has another type."""
        here, there = generator_type(self._generator), self._tree["type"]
        if here != there:
            differences.differ(self._path, f"{here} here, {there} in the checkpoint")

    def prepare(self, make: Maker) -> None:
        """Try the saved state on a scratch generator, so that `write` cannot fail; raise IntegrityError if it fails."""
        self._value = unpack(self._tree["state"], partial(make, now=True))
        try:
            set_stream(scratch_generator(self._generator), self._value)
        except (TypeError, ValueError, LookupError, RuntimeError, AttributeError, OverflowError) as error:
            raise IntegrityError(f"the stored state of the generator is not one: {error}", key=self._path) from error

    def write(self) -> None:
        """Set the generator to the saved state."""
        set_stream(self._generator, self._value)


class StreamsPart:
    """Restores the process's streams. A stored stream of a missing device is an error; other streams stay unchanged."""

    guard: Guard | None = None

    def __init__(self, tree: Any):
        if type(tree) is not dict or not {"python", "numpy", "torch"} <= tree.keys():
            raise IntegrityError("the tree of the random streams is malformed", key=RNG)
        streams = process_streams(wanted=tree.keys())
        self._absent = sorted(tree.keys() - streams.keys())
        self._parts = [GeneratorPart(streams[n], f"{RNG}/{n}", t) for n, t in tree.items() if n in streams]

    def compare(self, differences: Differences) -> None:
        """Record stored streams whose devices this process lacks."""
        differences.unexpected += [f"{RNG}/{name} (this process has no device {name})" for name in self._absent]
        for part in self._parts:
            part.compare(differences)

    def prepare(self, make: Maker) -> None:
        """Try the saved state of every stream on a scratch generator, so that `write` cannot fail."""
        for part in self._parts:
            part.prepare(make)

    def write(self) -> None:
        """Set every stream to its saved state."""
        for part in self._parts:
            part.write()
