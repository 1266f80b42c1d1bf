"""The sampler under a DataLoader: workers, prefetch, epochs, and the streams of random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ckpt_tasks.data.sampler import ResumableSampler
from ckpt_tasks.errors import ConfigError

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2, "prefetch_factor": 4},
    {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True},
]
workers = pytest.mark.parametrize("options", WORKERS, ids=["alone", "workers", "persistent"])


class Ids(Dataset[int]):
    """Samples that are their own ids."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Ids):
    """Samples that are augmented from every global stream."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:  # type: ignore[override]  # another sample
        numpy = float(np.random.random())  # noqa: NPY002 (what users' data sets do)
        return index, random.random(), numpy, float(torch.rand(()))


def loop(
    size: int, batch_size: int, options: dict[str, Any], **more: Any
) -> tuple[ResumableSampler, Iterator[list[int]]]:
    """Build a sampler and the batches of ids that a training loop sees."""
    sampler = ResumableSampler(size, batch_size, **more)
    loader = DataLoader(Ids(size), batch_sampler=sampler, **options)
    return sampler, (batch.tolist() for batch in sampler.follow(loader))


@workers
@pytest.mark.parametrize("before", [0, 1, 4, 5, 6, 10, 13])
def test_a_new_process_goes_on_where_the_loop_was(options: dict[str, Any], before: int) -> None:
    """P22, P23: workers ran ahead, but a resume at batch k, at the end of an epoch too, gives exactly the rest."""
    expected = list(islice(loop(33, 7, {"num_workers": 0}, drop_last=False)[1], 20))
    sampler, batches = loop(33, 7, options, drop_last=False)
    assert list(islice(batches, before)) == expected[:before]
    resumed, rest = loop(33, 7, options, drop_last=False)
    resumed.load_state_dict(sampler.state_dict())
    assert list(islice(rest, 20 - before)) == expected[before:]


@workers
def test_a_restore_within_the_loop_goes_back(options: dict[str, Any]) -> None:
    """P22: after load_state_dict the running loop gives the batches of the new position, not what was prefetched."""
    sampler, batches = loop(40, 4, options)
    first = list(islice(batches, 3))
    saved = sampler.state_dict()
    then = list(islice(batches, 12))  # into the next epoch
    sampler.load_state_dict(saved)
    assert list(islice(batches, 12)) == then
    sampler.load_state_dict({**saved, "samples": 0})
    assert list(islice(batches, 3)) == first


@workers
def test_following_draws_no_random_number(options: dict[str, Any]) -> None:
    """P11, P25: starting and running loaders, epoch after epoch, leaves the global streams where they were."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    sampler, batches = loop(12, 4, options)
    list(islice(batches, 8))
    assert sampler.epoch == 2
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]  # noqa: NPY002


@workers
def test_augmentation_is_equal_after_a_resume(options: dict[str, Any]) -> None:
    """P25: a seeded data set draws the same for a sample and epoch in any worker, after a resume, on other ranks."""

    def build(**more: Any) -> tuple[ResumableSampler, Iterator[list[Any]]]:
        sampler = ResumableSampler(24, 4, seed=9, **more)
        dataset = sampler.seeded(Noisy(24))
        assert len(dataset) == 24  # type: ignore[arg-type]
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=list, **options)
        return sampler, iter(sampler.follow(loader))

    streams = torch.get_rng_state(), random.getstate()
    sampler, batches = build()
    first = list(islice(batches, 4))
    saved = sampler.state_dict()
    rest = list(islice(batches, 5))
    resumed, again = build()
    resumed.load_state_dict(saved)
    assert list(islice(again, 5)) == rest
    other, on_rank_1 = build(rank=1, world_size=2)
    by_id = {sample[0]: sample for batch in first + rest[:2] for sample in batch}
    assert {sample[0]: sample for batch in islice(on_rank_1, 3) for sample in batch}.items() <= by_id.items()
    assert other.epoch == 1
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    # … and numbers differ from sample to sample, and from epoch to epoch.
    second_epoch = {sample[0]: sample for batch in rest[2:] for sample in batch}
    assert len({sample[1:] for sample in by_id.values()}) == 24
    assert all(by_id[number] != sample for number, sample in second_epoch.items())


def test_a_failing_sample_leaves_the_streams_alone() -> None:
    """P11: where a seeded data set raises, the global streams are as they were."""

    class Broken(Ids):
        def __getitem__(self, index: int) -> int:
            torch.rand(3)
            raise OSError(f"sample {index} cannot be read")

    sampler = ResumableSampler(8, 2)
    loader = DataLoader(sampler.seeded(Broken(8)), batch_sampler=sampler)
    before = torch.get_rng_state()
    with pytest.raises(OSError, match="cannot be read"):
        next(iter(sampler.follow(loader)))
    assert torch.equal(torch.get_rng_state(), before)
    assert sampler.samples == 0, "a batch that was never handed over does not count"


def test_the_loader_keeps_its_own_generator() -> None:
    """A generator that the user gave to the loader is neither drawn from nor replaced."""
    sampler, generator = ResumableSampler(8, 2), torch.Generator()
    before = generator.get_state()
    loader = DataLoader(Ids(8), batch_sampler=sampler, generator=generator)
    next(iter(sampler.follow(loader)))
    assert loader.generator is generator
    assert torch.equal(generator.get_state(), before)


def test_another_loader_is_refused() -> None:
    """A loader that draws from another sampler, or from none, is refused before the first batch."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    sampler = ResumableSampler(8, 2)
    for loader in (DataLoader(Ids(8), batch_size=2), DataLoader(Stream(), batch_size=2)):
        with pytest.raises(ConfigError, match="another sampler"):
            sampler.follow(loader)


def test_a_loop_of_ones_own_advances_by_hand() -> None:
    """P23: a loop that iterates the loader per epoch and calls advance sees each epoch whole, and len() shrinks."""
    sampler = ResumableSampler(10, 4, drop_last=False)
    loader = DataLoader(Ids(10), batch_sampler=sampler, generator=torch.Generator())
    for epoch in range(3):
        assert sampler.epoch == epoch
        seen, left = [], []
        for batch in loader:
            left.append(len(sampler))
            sampler.advance()
            seen += batch.tolist()
        assert sorted(seen) == list(range(10))
        assert left == [3, 2, 1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["follow", "advance", "fetched"])
def test_only_a_position_that_never_moves_is_warned_of(
    caplog: pytest.LogCaptureFixture, how: str, workers: int
) -> None:
    """P23: saves after any number of batches say nothing if the loop moves the sampler, or has had no batch yet."""
    sampler = ResumableSampler(24, 4)
    loader = DataLoader(Ids(24), batch_sampler=sampler, num_workers=workers, generator=torch.Generator())
    batches = sampler.follow(loader) if how == "follow" else iter(loader)
    for _ in range(4):
        sampler.state_dict()
        if how != "fetched":
            next(batches)
        if how == "advance":
            sampler.advance()
    assert "does not move" not in caplog.text
