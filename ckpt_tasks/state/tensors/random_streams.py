"""Random streams: the process's streams, and the user's own generators.

The streams of a process are Python's, NumPy's legacy global stream, torch's CPU stream, and torch's stream of every
CUDA device that the process uses. Reading them draws no number.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

_BITS = (np.random.Generator, np.random.BitGenerator)  # Both have seeds for spawned generators.
GENERATORS = (torch.Generator, *_BITS, np.random.RandomState, random.Random, np.random.SeedSequence)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore every stream of the process after a block that runs foreign code, which may draw numbers.

    Numbers that other threads draw during the block are drawn again later, so wrap only code that needs this.
    """
    before = current_streams()
    try:
        yield
    finally:
        for stream, state in before.values():
            if not same_state(stream_state(stream), state):
                set_stream(stream, state)


class OwnStreams:
    """Separate the random streams of training from those of the rest of the process.

    Otherwise other code in the process (Prefect draws names and delays from Python's stream) would change the numbers
    that training gets, and training would not be reproducible. While a block runs, other threads draw from training's
    streams, too.
    """

    def __init__(self) -> None:
        self._inside: Mapping[str, tuple[Any, Any]] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Use training's streams in a block; the first block starts with the process's streams."""
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
    """Return the streams of the process: name → (generator, its current state)."""
    return {name: (stream, stream_state(stream)) for name, stream in process_streams().items()}


def set_streams(streams: Mapping[str, tuple[Any, Any]]) -> None:
    """Set streams of the process to states from current_streams()."""
    for stream, state in streams.values():
        set_stream(stream, state)


def process_streams(wanted: Any = ()) -> dict[str, Any]:
    """Return the generators of the process by name, including the generators of the `wanted` devices."""
    # These objects are behind the module-level functions of random and numpy.random.
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
    # Save only streams of used devices: a process that sees eight may resume on a host with one.
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return has_context is None or bool(has_context(device))


def generator_type(generator: Any) -> str:
    """Return the name of a generator's type in checkpoints."""
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


def set_stream(generator: Any, state: Any) -> None:
    """Set a generator to a state from `stream_state`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.SeedSequence):
        generators_state = state["seeds"].__reduce__()[2]
        cast("Any", generator).__setstate__(generators_state)  # Set the seed in place: several generators may share it.
    elif isinstance(generator, _BITS):
        bits: Any = getattr(generator, "bit_generator", generator)
        bits.state = state
        if type(bits.seed_seq) is np.random.SeedSequence and "seeds" in state:
            set_stream(bits.seed_seq, state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate((state["version"], tuple(map(int, state["numbers"])), state["gauss"]))


def scratch_generator(generator: Any) -> Any:
    """Make another generator of the same type, to test a state on it."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    if isinstance(generator, np.random.Generator):
        return np.random.Generator(type(generator.bit_generator)())
    if isinstance(generator, (np.random.BitGenerator, np.random.SeedSequence)):
        return type(generator)()
    return np.random.RandomState() if isinstance(generator, np.random.RandomState) else random.Random()


def same_state(one: Any, other: Any) -> bool:
    """Return True if two states of a generator are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other))
