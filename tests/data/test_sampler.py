"""The sampler by itself: positions, ranks, epoch edges, and what it refuses; and the shuffle that it draws from."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.data.order import Permutation
from ckpt_tasks.data.sampler import ResumableSampler
from ckpt_tasks.errors import ConfigError, StateMismatchError
from ckpt_tasks.format.tree import decode, encode


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
    assert len(resumed) == len(list(resumed))
    assert steps(resumed, 30) == steps(uninterrupted, 30)


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


@given(size=st.integers(1, 300), batch_size=st.integers(2, 6), world_size=st.integers(1, 6))
def test_every_rank_has_work_in_every_step(size: int, batch_size: int, world_size: int) -> None:
    """P23: with drop_last off, no rank goes without a sample where batches of two or more begin the epoch together."""
    size = max(size, world_size)
    samplers = gang(size, batch_size, world_size, None, drop_last=False)
    batches = [list(sampler) for sampler in samplers]
    assert {len(of_rank) for of_rank in batches} == {len(samplers[0])}
    assert all(1 <= len(batch) <= batch_size for of_rank in batches for batch in of_rank)
    assert sorted(sample for of_rank in batches for batch in of_rank for sample in batch) == list(range(size))


def test_ranks_without_a_sample_still_step() -> None:
    """P26: fewer samples left than ranks: the others get an empty batch, and all make the same number of steps."""
    one = ResumableSampler(10, 1, drop_last=False)
    steps(one, 8)
    samplers = gang(10, 1, 3, one.state_dict(), drop_last=False)
    assert [len(list(sampler)) for sampler in samplers] == [1, 1, 1]
    assert [len(next(iter(sampler))) for sampler in samplers] == [1, 1, 0]
    whole = gang(3, 1, 2, None, drop_last=False)
    assert [[len(batch) for batch in sampler] for sampler in whole] == [[1, 1], [1, 0]]  # the last batch alone


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("size", [12, 13, 15])
def test_the_last_batch_ends_the_epoch(size: int, drop_last: bool) -> None:
    """P23: after the last batch, whole, cut or dropped, the position is the start of the next epoch."""
    sampler = ResumableSampler(size, 4, drop_last=drop_last)
    count = len(sampler)
    assert count == (size // 4 if drop_last else -(-size // 4))
    first = steps(sampler, count)
    assert (sampler.epoch, sampler.samples) == (1, 0)
    assert sum(map(len, first)) == (size - size % 4 if drop_last else size)
    assert all(first), "no batch is empty"


@pytest.mark.parametrize(
    ("samples", "drop_last", "expected"), [(12, True, 1), (10, True, 1), (12, False, 1), (10, False, 0)]
)
def test_a_position_at_the_end_is_the_next_epoch(samples: int, drop_last: bool, expected: int) -> None:
    """P23: a saved position with no batch after it, exactly len or too near to it, goes on with the next epoch."""
    sampler = ResumableSampler(12, 4, drop_last=drop_last)
    sampler.load_state_dict({**sampler.state_dict(), "samples": samples})
    assert sampler.epoch == expected
    assert next(iter(sampler))


def test_epochs_differ_and_seeds_differ() -> None:
    """P24: the order depends on the epoch and the seed, without anybody calling set_epoch."""
    sampler = ResumableSampler(50, 50, seed=1)
    orders = [tuple(order) for order in steps(sampler, 3)] + [tuple(steps(ResumableSampler(50, 50, seed=2), 1)[0])]
    assert len(set(orders)) == 4
    assert {frozenset(order) for order in orders} == {frozenset(range(50))}


def test_it_can_leave_the_order_alone() -> None:
    """Without shuffle the samples come in their own order, in every epoch."""
    assert steps(ResumableSampler(5, 2, shuffle=False, drop_last=False), 4) == [[0, 1], [2, 3], [4], [0, 1]]


def test_iterating_moves_nothing() -> None:
    """P22: what is drawn ahead does not move the position, and an iterator begins where the position was."""
    sampler = ResumableSampler(100, 10)
    ahead = iter(sampler)
    before = sampler.state_dict()
    drawn = list(islice(ahead, 5))
    assert sampler.state_dict() == before
    assert steps(sampler, 5) == drawn


def test_a_resume_reads_nothing_of_the_past() -> None:
    """A position deep in an epoch of 2**62 samples is reached at once: no order is stored and none is replayed."""
    sampler = ResumableSampler(2**62, 3, seed=5)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 10**9, "samples": 2**61})
    assert len(set(sum(steps(sampler, 4), []))) == 12  # noqa: RUF017 (four lists of three)
    assert sampler.samples == 2**61 + 12


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"size": 101}, "size is 101"),
        ({"seed": 8}, "seed is 8"),
        ({"shuffle": False}, "shuffle is False"),
        ({"shuffle": 1}, "shuffle is 1"),
        ({"order_version": 2}, "order_version is 2"),
        ({"samples": 101}, "samples is 101"),
        ({"samples": -1}, "samples is -1"),
        ({"samples": 3.0}, "samples is 3.0"),
        ({"samples": True}, "samples is True"),
        ({"epoch": -1}, "epoch is -1"),
        ({"epoch": None}, "epoch is None"),
    ],
)
def test_another_order_is_refused(changed: dict[str, Any], named: str) -> None:
    """P24: a state of other data, another seed or a bad position is refused by name, and the target is untouched."""
    sampler = ResumableSampler(100, 10)
    steps(sampler, 3)
    before = sampler.state_dict()
    with pytest.raises(StateMismatchError, match=named) as caught:
        sampler.load_state_dict({**before, **changed})
    assert len(caught.value.different) == 1
    assert sampler.state_dict() == before


def test_another_kind_of_state_is_refused() -> None:
    """Missing and unexpected fields are listed, and the target is untouched."""
    sampler = ResumableSampler(100, 10)
    before = sampler.state_dict()
    with pytest.raises(StateMismatchError) as caught:
        sampler.load_state_dict({**{k: v for k, v in before.items() if k != "samples"}, "offset": 3})
    assert (caught.value.missing, caught.value.unexpected) == (("samples",), ("offset",))
    assert sampler.state_dict() == before


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": 0},
        {"size": -1},
        {"size": 10.0},
        {"size": True},
        {"size": 2**62 + 1},
        {"batch_size": 0},
        {"batch_size": "8"},
        {"batch_size": True},
        {"seed": -1},
        {"seed": None},
        {"world_size": 0},
        {"rank": -1},
        {"rank": 2, "world_size": 2},
        {"size": 7, "batch_size": 8},
        {"size": 15, "batch_size": 8, "world_size": 2},
        {"size": 2, "batch_size": 1, "world_size": 3, "drop_last": False},
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    """Arguments that are no sizes, or that make an epoch without a batch, are refused at construction by name."""
    with pytest.raises(ConfigError) as caught:
        ResumableSampler(**{"size": 100, "batch_size": 8, **arguments})
    assert caught.value.key in arguments


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1023, 1024, 1025, 4097])
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


@pytest.mark.parametrize("size", [7, pytest.param(100, marks=pytest.mark.slow), 1000])
def test_it_shuffles(size: int) -> None:
    """Over many epochs each element is as likely in each place, and neighbours are no nearer than by chance."""
    epochs = 4000
    orders = np.stack([Permutation(size, f"0/{epoch}")(np.arange(size)) for epoch in range(epochs)])
    counts = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    expected = epochs / size
    assert ((counts - expected) ** 2 / expected).sum() / size**2 < 1.2  # about 1 by chance; 100 and more for no shuffle
    steps = np.bincount(((orders[:, 1:] - orders[:, :-1]) % size).ravel(), minlength=size)[1:]
    assert ((steps - steps.mean()) ** 2 / steps.mean()).sum() / size < 1.2
