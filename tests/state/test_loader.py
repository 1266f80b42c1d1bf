"""`ResumableLoader`: the length of a whole epoch, a position that a restore sets, and random numbers of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from ckpt_tasks import ResumableLoader
from ckpt_tasks.errors import ConfigError, StateMismatchError
from ckpt_tasks.format.tree import decode, encode

SAMPLES = 22  # 6 batches of 4, the last one of 2


class Noisy(Dataset[torch.Tensor]):
    """Every sample draws from all three global streams, and from generators of its own and of its transforms."""

    def __init__(self, seed: int = 3) -> None:
        self.crops = [{"random": np.random.default_rng(seed)}]
        self.blur, self.flip = np.random.RandomState(seed), random.Random(seed)
        self.noise = torch.Generator().manual_seed(seed)

    def own(self) -> list[float]:
        own = [self.crops[0]["random"].random(), self.blur.random_sample(), self.flip.random()]
        return [*own, torch.rand((), generator=self.noise).item()]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        legacy = np.random.random()  # noqa: NPY002 (a global stream)
        own = [random.random(), legacy, torch.rand(()).item(), *self.own()]
        return torch.tensor([index, *own], dtype=torch.float64)


def loader(workers: int = 0, **options: Any) -> ResumableLoader:
    return ResumableLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers, **options)


def trained(one: ResumableLoader, batches: int) -> list[list[list[float]]]:
    """Take batches as a loop over epochs does."""
    taken: list[list[list[float]]] = []
    while len(taken) < batches:
        for batch in one:
            taken.append(batch.tolist())
            if len(taken) == batches:
                break
    return taken


def streams() -> tuple[Any, Any, bytes]:
    legacy = np.random.get_state()  # noqa: NPY002 (a global stream)
    return random.getstate(), repr(legacy), torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_twice_with_the_same_samples(workers: int) -> None:
    """P23: restored in an epoch, and restored again from there, every batch is that of a loader without a stop."""
    expected = trained(loader(), 18)
    first = loader(workers)
    seen = trained(first, 4)
    second = loader(workers)
    second.load_state_dict(decode(encode(first.state_dict())))
    seen += trained(second, 9)  # over the end of an epoch
    third = loader(workers)
    third.load_state_dict(decode(encode(second.state_dict())))
    assert (third.epoch, seen + trained(third, 5)) == (2, expected)


def test_generators_of_a_data_set_keep_their_seeds_and_states() -> None:
    """P23: every batch and each of the generators draws other numbers, of another seed too, and moves none of them."""
    one, other = Noisy(), Noisy(seed=4)
    batches = [*ResumableLoader(one, batch_size=4), *ResumableLoader(other, batch_size=4)]
    drawn = torch.cat(batches)[:, 4:].flatten().tolist()
    assert len({*drawn}) == len(drawn) == 2 * 4 * SAMPLES
    assert (one.own(), other.own()) == (Noisy().own(), Noisy(seed=4).own())


def test_its_length_is_that_of_a_whole_epoch() -> None:
    """P23: wherever the position is, `len` counts the batches of an epoch; what is left of it is iterated."""
    one = loader()
    assert len(one) == 6
    trained(one, 4)
    resumed = loader()
    resumed.load_state_dict(one.state_dict())
    assert (len(resumed), len([*resumed]), len(resumed), len([*resumed])) == (6, 2, 6, 6)
    assert len(loader(drop_last=True)) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_it_leaves_the_global_streams_alone(workers: int) -> None:
    """P24: neither `iter` nor a data set that draws moves a stream, and what is in the streams changes no sample."""
    expected = trained(loader(), 7)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 (a global stream)
    torch.manual_seed(5)
    before = streams()
    assert trained(loader(workers), 7) == expected
    assert streams() == before


def test_a_loop_that_ends_early_begins_the_next_epoch() -> None:
    """As with any loader `iter` begins an epoch; only the first one after a restore goes on in the middle of one."""
    one, whole = loader(), trained(loader(), 12)
    assert [batch.tolist() for batch in islice(one, 2)] == whole[:2]
    resumed = loader()
    resumed.load_state_dict(one.state_dict())
    assert [batch.tolist() for batch in islice(one, 2)] == whole[6:8]
    assert [batch.tolist() for batch in resumed] == whole[2:6]
    assert [batch.tolist() for batch in islice(resumed, 2)] == whole[6:8]


def test_an_epoch_ends_with_its_loop() -> None:
    """P23: saved at an epoch's last batch, it goes on at the end of that epoch, with what a loop does there.

    A framework, which counts epochs itself, goes on with the next epoch's batches.
    """
    one, whole = loader(), trained(loader(), 12)
    trained(one, 6)
    saved = decode(encode(one.state_dict()))
    resumed, framework = loader(), loader()
    resumed.load_state_dict(saved)
    assert [(epoch, [batch.tolist() for batch in resumed]) for epoch in resumed.epochs(2)] == [(0, []), (1, whole[6:])]
    assert [*resumed.epochs(2)] == []
    framework.load_state_dict(saved)
    assert [batch.tolist() for batch in framework] == [batch.tolist() for batch in one] == whole[6:]
    skipping = loader()
    skipping.load_state_dict(loader().state_dict() | {"samples": SAMPLES})
    skipping.skip_batches(4)
    left = [[batch.tolist() for batch in skipping] for _ in skipping.epochs(2)]
    assert left == [[], whole[10:]]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_skipped_within_a_loop_too(workers: int) -> None:
    """A rollback leaves them out when their turn comes: in the middle of an epoch, over its end, and at its end."""
    whole = trained(loader(), 18)
    for at, skipped in ((2, 2), (4, 3), (6, 4)):
        one, seen = loader(workers), []
        while one.epoch < 2:
            for batch in one:
                seen.append(batch.tolist())
                if len(seen) == at:
                    one.skip_batches(skipped)
        assert seen == whole[:at] + whole[at + skipped : 12]
    one = loader()
    seen, position = [], one.state_dict()
    while one.epoch < 2:
        for batch in one:
            seen.append(batch.tolist())
            if len(seen) == 3:
                position = one.state_dict()
            if len(seen) == 8:  # a loop that goes back by itself, after a loss that is not finite
                one.load_state_dict(position)
    assert seen == whole[:8] + whole[3:12]


def test_the_position_before_the_batch_in_hand() -> None:
    """A save before that batch is trained goes on with it; the other position goes on after it."""
    one, whole = loader(), trained(loader(), 6)
    trained(one, 3)
    for state, begin in ((one.state_before(), 2), (one.state_dict(), 3)):
        resumed = loader()
        resumed.load_state_dict(state)
        assert trained(resumed, 2) == whole[begin : begin + 2]


class Endless(IterableDataset[int]):
    """It has no length."""

    def __iter__(self) -> Iterator[int]:
        return count()


def test_what_it_cannot_do_is_refused() -> None:
    """P50: a stream, a sampler of one's own, and a position of another data set."""
    with pytest.raises(ConfigError, match="StatefulDataLoader"):
        ResumableLoader(Endless())
    with pytest.raises(ConfigError, match="generator"):
        loader(generator=torch.Generator())
    other = ResumableLoader(torch.utils.data.TensorDataset(torch.zeros(9)), batch_size=4, shuffle=True)
    with pytest.raises(StateMismatchError):
        loader().load_state_dict(other.state_dict())
