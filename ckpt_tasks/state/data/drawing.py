"""Random numbers for batches and samples, which depend only on a seed and the position in the data."""

from __future__ import annotations

import ctypes
import hashlib
import math
import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from ckpt_tasks.checked import checked
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.state.groups import has_any, held_in
from ckpt_tasks.state.tensors.random_streams import GENERATORS, set_streams, stream_state

if TYPE_CHECKING:
    from ckpt_tasks.state.data.sampler import SampleId

_T = TypeVar("_T")
_WORDS = 625  # A Mersenne Twister: 624 words and the number of the next one.
_CALM = 8  # After so many batches that drew nothing, the streams are set only where a batch draws.

# The seed and the epoch of the batch that a loader is making.
_of_batch: ContextVar[tuple[int | None, int | None]] = ContextVar("_of_batch", default=(None, None))


@checked
def sample_generator(
    index: int, *, seed: int | None = None, epoch: int | None = None, numpy: bool = False
) -> torch.Generator | np.random.Generator:
    """Return a generator for the random numbers of one sample: they are equal after a resume, and with any workers.

    ::

        def __getitem__(self, index):
            generator = sample_generator(index)
            return self.rows[index] + torch.randn(8, generator=generator)

    The numbers depend only on (seed, epoch, index): not on workers, ranks, batch size or the order of the samples. In
    the data set or `collate_fn` of a ResumableLoader, seed and epoch default to the loader's; elsewhere, raises
    ConfigError if one is missing. `numpy`: return a NumPy generator.
    """
    of_batch = _of_batch.get()
    seed, epoch = (of_batch[0] if seed is None else seed), (of_batch[1] if epoch is None else epoch)
    if seed is None or epoch is None:
        raise ConfigError(
            "sample_generator is outside of a ResumableLoader's batch",
            key="seed" if seed is None else "epoch",
            hint="Write sample_generator(index, seed=…, epoch=…).",
        )
    number = seed_of(f"{seed}/{epoch}/{operator.index(index)}/generator")
    return np.random.default_rng(number) if numpy else torch.Generator().manual_seed(number)


@contextmanager
def own_random_numbers(seed: int, epoch: int, what: str, *holders: Any) -> Iterator[None]:
    """Seed the global CPU streams and the generators in `holders` for a block that makes the part `what` of an epoch.

    The end of the block restores their old states. The new state of a generator in `holders` also depends on its old
    state, so the user's own seed still matters.
    """
    python, legacy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    held = {str(id(one)): (one, stream_state(one)) for holder in holders for _, one in held_in(holder, GENERATORS)}
    number, token = seed_of(f"{seed}/{epoch}/{what}"), _of_batch.set((seed, epoch))
    try:
        for one, _ in held.values():
            _seed_held(one, number)
        random.seed(number)
        np.random.seed([number >> 32, number & 0xFFFFFFFF])  # noqa: NPY002 (the data set draws from it)
        torch.default_generator.manual_seed(number)  # torch.manual_seed would also seed the accelerators.
        yield
    finally:
        _of_batch.reset(token)
        set_streams(held)
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.set_rng_state(cpu)


class OwnNumbers:
    """Makes the parts of an epoch, each with random numbers of its own; costs little where nothing is drawn.

    To save, seed and set NumPy's stream and Python's takes 60 µs. If the first parts draw from neither, later ones are
    made without it, and a look at both streams before and after says whether this was right. A part that has drawn is
    made again from its own numbers, and so is each one after it. torch's stream is seeded for every part.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._calm: float = 0  # So many parts drew nothing; -inf if one has drawn.
        self._numpy: bytes | None = None  # NumPy's stream when it was known to hold no second Gaussian number.

    def make(self, make: Callable[[], _T], epoch: int, what: str, *holders: Any) -> _T:
        """Return what `make` returns for the part `what` of an epoch; see `own_random_numbers`."""
        if self._calm < 0:
            with own_random_numbers(self.seed, epoch, what, *holders):
                return make()
        before = _look()
        generators = any(has_any(holder, GENERATORS) for holder in holders)
        if before is None or generators or self._calm < _CALM or before.numpy != self._numpy:
            return self._make_seeded(make, epoch, what, *holders)
        cpu, token = torch.get_rng_state(), _of_batch.set((self.seed, epoch))
        torch.default_generator.manual_seed(seed_of(f"{self.seed}/{epoch}/{what}"))
        try:
            made = make()
        finally:
            torch.set_rng_state(cpu)
            _of_batch.reset(token)
            if draws := _look() != before:
                self._calm = -math.inf
                before.put_back()
        return self._make_seeded(make, epoch, what, *holders) if draws else made

    def _make_seeded(self, make: Callable[[], _T], epoch: int, what: str, *holders: Any) -> _T:
        with own_random_numbers(self.seed, epoch, what, *holders):
            seeded = _look()
            made = make()
            drew = _look() != seeded
        self._calm = -math.inf if drew else self._calm + 1
        after, state = _look(), np.random.get_state(legacy=False)  # noqa: NPY002 (the stream that it draws from)
        self._numpy = after.numpy if after and not state["has_gauss"] else None
        return made


class _Look(NamedTuple):
    """The states of Python's and NumPy's streams, as they are in memory."""

    python: bytes
    gauss: float | None
    numpy: bytes

    def put_back(self) -> None:
        """Set both streams; NumPy's held no second Gaussian number."""
        at, *words = np.frombuffer(self.python, np.uint32).tolist()
        random.setstate((3, (*words, at), self.gauss))
        words = np.frombuffer(self.numpy, np.uint32)
        np.random.set_state(("MT19937", words[:-1], int(words[-1]), 0, 0.0))  # noqa: NPY002 (the data set draws from it)


def _look() -> _Look | None:
    """Read both streams where they lie: half a microsecond each, where `getstate` takes 7 and 20; None if it cannot."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if _memory.numpy_of is not bits:
        _memory.find(bits)
    if _memory.python is None or _memory.numpy is None:
        return None
    return _Look(bytes(_memory.python), _memory.of.gauss_next, bytes(_memory.numpy))


class _Memory:
    """Where the two streams lie. What is there is compared with their states once: another layout is not used."""

    def __init__(self) -> None:
        self.of: Any = random.getstate.__self__  # type: ignore[attr-defined]
        self.numpy_of: Any = None
        self.python: ctypes.Array[ctypes.c_uint32] | None = None
        self.numpy: ctypes.Array[ctypes.c_uint32] | None = None

    def find(self, bits: Any) -> None:
        """Find the streams of this process."""
        self.numpy_of, self.python, self.numpy = bits, None, None
        if type(bits) is not np.random.MT19937 or not isinstance(self.of, random.Random):
            return
        words = ctypes.c_uint32 * _WORDS
        python, numpy = (
            words.from_address(id(self.of) + object.__basicsize__),
            words.from_address(bits.ctypes.state_address),
        )
        known = bits.state["state"]
        if [*python[1:], python[0]] == [*random.getstate()[1]] and [*numpy] == [*known["key"].tolist(), known["pos"]]:
            self.python, self.numpy = python, numpy


_memory = _Memory()


def _seed_held(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        own = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        generator.manual_seed(seed ^ own)
    elif isinstance(generator, np.random.Generator):
        bits, own = generator.bit_generator, int(generator.integers(2**62))
        bits.state = type(bits)(seed ^ own).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed([int(generator.randint(2**31)), seed >> 32, seed & 0xFFFFFFFF])
    else:
        generator.seed(seed ^ generator.getrandbits(62))


def seed_of(text: str) -> int:
    """Return 64 bits of a text's digest, equal in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mixed_seed(value: int) -> int:
    """Return 64 bits that depend on all bits of a number: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


class MadeBatches(Dataset[Any]):
    """Makes whole collated batches, each with its own random streams."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], seed: int):
        self._dataset = dataset
        self._collate = collate
        self._own = OwnNumbers(seed)

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # checked by the loader

    def __getitems__(self, samples: list[SampleId]) -> Any:
        """Return a batch; only its first sample has an epoch."""
        if not samples:
            return self._collate([])
        several = getattr(self._dataset, "__getitems__", None)
        ids = [int(samples[0]), *samples[1:]]

        def make() -> Any:
            return self._collate(several(ids) if several else [self._dataset[i] for i in ids])

        return self._own.make(make, samples[0].epoch, f"{int(samples[0])}/batch", self._dataset, self._collate)
