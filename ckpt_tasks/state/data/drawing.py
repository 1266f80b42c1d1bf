"""Random numbers for batches and samples, which depend only on a seed and the position in the data."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from ckpt_tasks.checked import checked
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.state.groups import held_in
from ckpt_tasks.state.tensors.random_streams import GENERATORS, set_streams, stream_state

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
