"""The sampler by itself: positions, ranks, epoch edges, and what it refuses; and the shuffle that it draws from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.errors import ConfigError, StateMismatchError
from ckpt_tasks.format.tree import decode, encode
from ckpt_tasks.state.data.order import Permutation
from ckpt_tasks.state.data.sampler import ResumableSampler


def steps(sampler: ResumableSampler, count: int) -> list[list[int]]:
    """Take `count` batches as a loop does that iterates by itself."""
    taken = []
    for _ in range(count):
        taken.append(next(iter(sampler)))
        sampler.advance()
    return taken


def gang(size: int, batch_size: int, world_size: int, saved: dict[str, Any] | None, **options: Any) -> list[Any]:
    """Build one sampler per rank, each at the position that was saved."""
    samplers = [
        ResumableSampler(size, batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]
    for sampler in samplers:
        if saved is not None:
            sampler.load_state_dict(saved)
    return samplers


def epoch_of(samplers: list[ResumableSampler], most: int | None = None) -> list[list[int]]:
    """Run all ranks to the end of the epoch, or for `most` steps; return the ids of each step of all ranks."""
    epoch, seen = samplers[0].epoch, list[list[int]]()
    while samplers[0].epoch == epoch and (most is None or len(seen) < most):
        seen.append([sample for sampler in samplers for sample in steps(sampler, 1)[0]])
        assert len({(sampler.epoch, sampler.samples) for sampler in samplers}) == 1, "ranks fell out of step"
    return seen


@given(
    size=st.integers(1, 200),
    batch_size=st.integers(1, 20),
    before=st.integers(0, 60),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_it_goes_on_at_any_step(size: int, batch_size: int, before: int, drop_last: bool, shuffle: bool) -> None:
    """P23, P24: a fresh sampler at a saved position gives what the uninterrupted one gives, over epochs too."""
    if drop_last and size < batch_size:
        batch_size = size
    uninterrupted = ResumableSampler(size, batch_size, drop_last=drop_last, shuffle=shuffle, seed=3)
    steps(uninterrupted, before)
    resumed = ResumableSampler(size, batch_size, drop_last=drop_last, shuffle=shuffle, seed=3)
    resumed.load_state_dict(decode(encode(uninterrupted.state_dict())))
    assert resumed.state_dict() == uninterrupted.state_dict()
    ahead = list(resumed)  # what is drawn ahead does not move the position
    assert len(resumed) == len(ahead)
    assert resumed.state_dict() == uninterrupted.state_dict()
    rest = steps(resumed, 30)
    assert rest[: len(ahead)] == ahead[:30]
    assert rest == steps(uninterrupted, 30)
    whole = epoch_of([ResumableSampler(size, batch_size, drop_last=drop_last, shuffle=shuffle, seed=3)])
    samples = [sample for batch in whole for sample in batch]
    assert sorted(samples) == [*range(size)] if not drop_last else len({*samples}) == size - size % batch_size
    assert all(whole), "no batch is empty"
    assert shuffle or samples == [*range(len(samples))]


@given(
    size=st.integers(1, 150),
    batch_size=st.integers(1, 8),
    drop_last=st.booleans(),
    stages=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5),
    world_size=st.integers(1, 6),
)
def test_the_world_changes_size(
    size: int, batch_size: int, drop_last: bool, stages: list[tuple[int, int]], world_size: int
) -> None:
    """P26: over changes of the world size in an epoch, no sample of it is lost or comes twice on any rank."""
    most = max(world_size, *(ranks for ranks, _ in stages))
    size = max(size, most * batch_size)  # every world has a batch
    saved, seen = None, []
    for ranks, batches in stages:
        samplers = gang(size, batch_size, ranks, saved, drop_last=drop_last)
        if samplers[0].epoch == 0:
            seen += epoch_of(samplers, most=batches)
        saved = samplers[0].state_dict()
    samplers = gang(size, batch_size, world_size, saved, drop_last=drop_last)
    if samplers[0].epoch == 0:
        seen += epoch_of(samplers)
    samples = [sample for step in seen for sample in step]
    assert len(samples) == len(set(samples))
    left_out = size - len(samples)
    assert left_out < batch_size * most if drop_last else left_out == 0
    # … and the next epoch begins at its beginning, for all of them.
    full = [
        sample for step in epoch_of(gang(size, batch_size, world_size, None, drop_last=drop_last)) for sample in step
    ]
    assert len(full) == size - (size % (batch_size * world_size) if drop_last else 0)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (3, 1), (2, 4)])
def test_an_equal_global_batch_sees_equal_samples(before: int, after: int) -> None:
    """P26: while batch_size x world_size stays the same, each step sees the same samples on any number of ranks."""
    uninterrupted = epoch_of(gang(120, 12 // before, before, None))
    first = gang(120, 12 // before, before, None)
    begun = epoch_of(first, most=4)
    rest = epoch_of(gang(120, 12 // after, after, first[0].state_dict()))
    assert [sorted(step) for step in begun + rest] == [sorted(step) for step in uninterrupted]


def test_a_resume_reads_nothing_of_the_past() -> None:
    """A position deep in an epoch of 2**62 samples is reached at once: no order is stored and none is replayed."""
    sampler = ResumableSampler(2**62, 3, seed=5)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 10**9, "samples": 2**61})
    assert len(set(sum(steps(sampler, 4), []))) == 12  # noqa: RUF017 (four lists of three)
    assert sampler.samples == 2**61 + 12


OTHER: dict[str, list[Any]] = {
    "size": [101],
    "seed": [8],
    "shuffle": [False, 1],
    "order_version": [2],
    "samples": [101, -1, 3.0, True],
    "epoch": [-1, None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OTHER.items() for value in values])
def test_another_order_is_refused(name: str, value: Any) -> None:
    """P24: a state of other data, another seed or a bad position is refused by name, and the target is untouched."""
    sampler = ResumableSampler(100, 10)
    steps(sampler, 3)
    before = sampler.state_dict()
    with pytest.raises(StateMismatchError, match=f"{name} is {value}") as caught:
        sampler.load_state_dict({**before, name: value})
    assert len(caught.value.different) == 1
    with pytest.raises(StateMismatchError) as differs:
        sampler.load_state_dict({**{key: one for key, one in before.items() if key != name}, "offset": 3})
    assert (differs.value.missing, differs.value.unexpected) == ((name,), ("offset",))
    assert sampler.state_dict() == before


BAD: dict[str, list[Any]] = {
    "size": [0, -1, 10.0, True, 2**62 + 1],
    "batch_size": [0, "8", True, 101],
    "seed": [-1, None],
    "world_size": [0, 13],
    "rank": [-1, 1],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    """Arguments that are no sizes, or that make an epoch without a batch, are refused at construction by name."""
    for value in BAD[name]:
        with pytest.raises(ConfigError) as caught:
            ResumableSampler(**{"size": 100, "batch_size": 8, name: value})
        assert caught.value.key in (name, "size")
    with pytest.raises(ConfigError):
        ResumableSampler(2, 1, world_size=3, drop_last=False)


@pytest.mark.parametrize("size", [*range(1, 18), 63, 64, 65, 257, 1025, 4097])
def test_every_sample_comes_once(size: int) -> None:
    """A permutation of any size, powers of two and their neighbours too, gives each element exactly once."""
    for key in ("0/0", "0/1", "3/7"):
        assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == list(range(size))


@given(size=st.integers(1, 2**62), data=st.data())
def test_any_position_of_a_huge_set_stands_alone(size: int, data: st.DataObject) -> None:
    """An element is the same asked for alone or among others, at any size, and stays in range."""
    position = st.integers(0, size - 1)
    positions = np.array(data.draw(st.lists(position, min_size=1, max_size=20, unique=True)), dtype=np.int64)
    permutation = Permutation(size, "key")
    together = permutation(positions)
    assert together.dtype == np.int64
    assert [permutation(positions[i : i + 1]).item() for i in range(len(positions))] == together.tolist()
    assert len(set(together.tolist())) == len(positions)
    assert together.min() >= 0
    assert together.max() < size


def test_the_order_is_pinned() -> None:
    """P24: a seed gives the order that it gave when the first checkpoints were written (else raise ORDER_VERSION)."""
    assert Permutation(100, "7/2")(np.arange(8)).tolist() == [26, 88, 95, 67, 49, 90, 3, 71]
    assert Permutation(2**62, "7/2")(np.array([0, 2**62 - 1])).tolist() == [418521823847432618, 30249234677619480]


@pytest.mark.parametrize("size", [7, pytest.param(1000, marks=pytest.mark.slow)])
def test_it_shuffles(size: int) -> None:
    """Over many epochs each element is as likely in each place, and neighbours are no nearer than by chance."""
    epochs = 4000 if size > 7 else 1500
    orders = np.stack([Permutation(size, f"0/{epoch}")(np.arange(size)) for epoch in range(epochs)])
    counts = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    expected = epochs / size
    assert ((counts - expected) ** 2 / expected).sum() / size**2 < 1.2  # about 1 by chance; 100 and more for no shuffle
    steps = np.bincount(((orders[:, 1:] - orders[:, :-1]) % size).ravel(), minlength=size)[1:]
    assert ((steps - steps.mean()) ** 2 / steps.mean()).sum() / size < 1.2
