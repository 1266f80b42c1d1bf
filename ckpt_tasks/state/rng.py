"""Random streams: those of the process, and the user's own generators.

The streams of a process are Python's, NumPy's legacy global one, torch's CPU stream, and torch's stream of every CUDA
device that the process uses. They are restored last; reading them draws no number.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.state.restore_parts import Differences, Maker, Rollback
from ckpt_tasks.state.tensors import TensorSet
from ckpt_tasks.state.values import pack, unpack

__all__ = [
    "GENERATORS",
    "RNG",
    "GeneratorPart",
    "OwnStreams",
    "StreamsPart",
    "capture_generator",
    "capture_streams",
    "current_streams",
    "preserved_rng",
    "seed_streams",
    "set_streams",
    "stream_state",
]

RNG = "rng"  # the group of the process's streams
_BITS = (np.random.Generator, np.random.BitGenerator)  # both have a bit generator, and the seeds of their children
GENERATORS = (torch.Generator, *_BITS, np.random.RandomState, random.Random, np.random.SeedSequence)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore every stream of the process at the end of the block, for foreign code that may draw from one.

    Numbers that other threads draw meanwhile are drawn again later: use it only around the code that needs it.
    """
    before = current_streams()
    try:
        yield
    finally:
        for stream, state in before.values():
            if not _equal(stream_state(stream), state):
                _set_state(stream, state)


class OwnStreams:
    """Separate the random streams of training from those of the rest of the process.

    Otherwise other code in the process (Prefect draws names and delays from Python's stream) would change the numbers
    that training gets, and training would not be reproducible. Threads that draw while a block runs are not separated:
    they share the process's streams.
    """

    def __init__(self) -> None:
        self._inside: Mapping[str, tuple[Any, Any]] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Set training's streams for a block; the first block starts with those of the process."""
        outside = current_streams()
        set_streams(self._inside)
        try:
            yield
        finally:
            self._inside = current_streams()
            set_streams(outside)


def seed_streams(seed: int) -> None:
    """Seed every stream of the process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (this is the stream that programs draw from)
    torch.manual_seed(seed)


def current_streams() -> dict[str, tuple[Any, Any]]:
    """Return the streams of the process: name → (generator, its present state)."""
    return {name: (stream, stream_state(stream)) for name, stream in _streams().items()}


def set_streams(streams: Mapping[str, tuple[Any, Any]]) -> None:
    """Set streams of the process to states that current_streams() returned."""
    for stream, state in streams.values():
        _set_state(stream, state)


def capture_streams(streams: Mapping[str, tuple[Any, Any]], tensors: TensorSet) -> dict[str, Any]:
    """Turn the result of current_streams() into a tree with the keys python, numpy, torch, cuda:0 …"""
    return {name: _tree(*taken, f"{RNG}/{name}", tensors) for name, taken in streams.items()}


def capture_generator(generator: Any, path: str, tensors: TensorSet) -> dict[str, Any]:
    """Turn a generator into a tree; raise UnsupportedStateError for one that has no state, such as SystemRandom."""
    try:
        return _tree(generator, stream_state(generator), path, tensors)
    except NotImplementedError as error:
        kind = type(generator).__qualname__
        raise UnsupportedStateError(f"a generator of type {kind} has no state to store", key=path) from error


def _tree(generator: Any, state: Any, path: str, tensors: TensorSet) -> dict[str, Any]:
    return {"type": _type(generator), "state": pack(state, path, tensors)}


class GeneratorPart:
    """Restore one generator."""

    guard: Rollback | None = None

    def __init__(self, generator: Any, path: str, tree: Any):
        self._generator = generator
        self._path = path
        self._tree = tree
        self._value: Any = None
        if type(tree) is not dict or not {"type", "state"} <= tree.keys():
            raise IntegrityError("the generator's tree is malformed", key=path)

    def compare(self, differences: Differences) -> None:
        """Compare the kind of generator."""
        here, there = _type(self._generator), self._tree["type"]
        if here != there:
            differences.differ(self._path, f"{here} here, {there} in the checkpoint")

    def prepare(self, make: Maker) -> None:
        """Try the state on a scratch generator, so that `write` cannot fail; raise IntegrityError if it fails."""
        self._value = unpack(self._tree["state"], partial(make, now=True))
        try:
            _set_state(_scratch(self._generator), self._value)
        except (TypeError, ValueError, LookupError, RuntimeError, AttributeError, OverflowError) as error:
            raise IntegrityError(f"the stored state of the generator is not one: {error}", key=self._path) from error

    def write(self) -> None:
        """Set the state."""
        _set_state(self._generator, self._value)


class StreamsPart:
    """Restore the streams of the process; a stored stream of a missing device is an error, one not stored stays."""

    guard: Rollback | None = None

    def __init__(self, tree: Any):
        if type(tree) is not dict or not {"python", "numpy", "torch"} <= tree.keys():
            raise IntegrityError("the tree of the random streams is malformed", key=RNG)
        streams = _streams(wanted=tree.keys())
        self._absent = sorted(tree.keys() - streams.keys())
        self._parts = [GeneratorPart(streams[n], f"{RNG}/{n}", t) for n, t in tree.items() if n in streams]

    def compare(self, differences: Differences) -> None:
        """Compare which streams there are."""
        differences.unexpected += [f"{RNG}/{name} (this process has no device {name})" for name in self._absent]
        for part in self._parts:
            part.compare(differences)

    def prepare(self, make: Maker) -> None:
        """Prepare every stream."""
        for part in self._parts:
            part.prepare(make)

    def write(self) -> None:
        """Set every stream."""
        for part in self._parts:
            part.write()


def _streams(wanted: Any = ()) -> dict[str, Any]:
    # The objects behind the module-level functions of random and numpy.random.
    streams: dict[str, Any] = {
        "python": random.getstate.__self__,  # type: ignore[attr-defined]
        "numpy": np.random.get_state.__self__,  # type: ignore[attr-defined]
        "torch": torch.default_generator,
    }
    asks = any(name.startswith("cuda:") for name in wanted)
    if torch.cuda.is_available() and (asks or torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for index, generator in enumerate(torch.cuda.default_generators):
            if f"cuda:{index}" in wanted or _in_use(index):
                streams[f"cuda:{index}"] = generator
    return streams


def _in_use(device: int) -> bool:
    # A process that sees eight devices but uses one can resume on a host with one.
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return has_context is None or bool(has_context(device))


def _type(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy.random.Generator of {type(generator.bit_generator).__name__}"
    if isinstance(generator, (np.random.BitGenerator, np.random.SeedSequence)):
        return f"numpy.random.{type(generator).__name__}"
    return "numpy.random.RandomState" if isinstance(generator, np.random.RandomState) else "random.Random"


def stream_state(generator: Any) -> Any:
    """Return the state of a generator as plain values, for `set_streams`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.SeedSequence):
        return {"seeds": generator}
    if isinstance(generator, _BITS):
        bits: Any = getattr(generator, "bit_generator", generator)
        return {**bits.state, **({"seeds": bits.seed_seq} if type(bits.seed_seq) is np.random.SeedSequence else {})}
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    version, numbers, gauss = generator.getstate()
    return {"version": version, "numbers": np.array(numbers, dtype=np.uint32), "gauss": gauss}


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.SeedSequence):
        generators_state = state["seeds"].__reduce__()[2]
        cast("Any", generator).__setstate__(generators_state)  # in place: several generators may have this seed
    elif isinstance(generator, _BITS):
        bits: Any = getattr(generator, "bit_generator", generator)
        bits.state = state
        if type(bits.seed_seq) is np.random.SeedSequence and "seeds" in state:
            _set_state(bits.seed_seq, state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate((state["version"], tuple(map(int, state["numbers"])), state["gauss"]))


def _scratch(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    if isinstance(generator, np.random.Generator):
        return np.random.Generator(type(generator.bit_generator)())
    if isinstance(generator, (np.random.BitGenerator, np.random.SeedSequence)):
        return type(generator)()
    return np.random.RandomState() if isinstance(generator, np.random.RandomState) else random.Random()


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other))
