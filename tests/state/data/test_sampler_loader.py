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

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.state.data.sampler import ResumableSampler
from tests.support.sweeps import quick_first

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2, "prefetch_factor": 4},
    {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True},
]
workers = pytest.mark.parametrize("options", quick_first(WORKERS, 2), ids=["alone", "workers", "persistent"])


class Ids(Dataset[Any]):
    """Samples that are their own ids."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index


class Noisy(Ids):
    """Samples that are augmented from every global stream."""

    def __getitem__(self, index: int) -> Any:
        numpy = float(np.random.random())  # noqa: NPY002 (what users' data sets do)
        return index, random.random(), numpy, float(torch.rand(()))


def streams() -> list[Any]:
    numpy: Any = np.random.get_state()  # noqa: NPY002 (a global stream)
    return [torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist()]


def loop(
    size: int, batch_size: int, options: dict[str, Any], **more: Any
) -> tuple[ResumableSampler, Iterator[list[int]]]:
    """Build a sampler and the batches of ids that a training loop sees."""
    sampler = ResumableSampler(size, batch_size, **more)
    loader = DataLoader(Ids(size), batch_sampler=sampler, **options)
    return sampler, (batch.tolist() for batch in sampler.follow(loader))


@workers
@pytest.mark.parametrize("before", quick_first([0, 4, 5, 13], 2))
def test_a_new_process_goes_on_where_the_loop_was(options: dict[str, Any], before: int) -> None:
    """P11, P22, P23: workers ran ahead, but a resume at batch k gives exactly the rest, also within the running loop.

    Loaders leave the global streams where they were.
    """
    began = streams()
    expected = list(islice(loop(33, 7, {"num_workers": 0}, drop_last=False)[1], 20))
    sampler, batches = loop(33, 7, options, drop_last=False)
    assert list(islice(batches, before)) == expected[:before]
    resumed, rest = loop(33, 7, options, drop_last=False)
    saved = sampler.state_dict()
    resumed.load_state_dict(saved)
    for _ in range(2):
        assert list(islice(rest, 20 - before)) == expected[before:]
        resumed.load_state_dict(saved)
    assert streams() == began


@workers
def test_augmentation_is_equal_after_a_resume(options: dict[str, Any]) -> None:
    """P25: a seeded data set draws the same for a sample and epoch in any worker, after a resume, on other ranks."""

    def build(**more: Any) -> tuple[ResumableSampler, Iterator[list[Any]]]:
        sampler = ResumableSampler(24, 4, seed=9, **more)
        dataset = sampler.seeded(Noisy(24))
        assert len(dataset) == 24  # type: ignore[arg-type]
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=list, **options)
        return sampler, iter(sampler.follow(loader))

    began = streams()
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
    assert streams() == began
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


def test_another_loader_is_refused() -> None:
    """A loader that draws from another sampler, or from none, is refused before the first batch."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    sampler = ResumableSampler(8, 2)
    for loader in (DataLoader(Ids(8), batch_size=2), DataLoader(Stream(), batch_size=2)):
        with pytest.raises(ConfigError, match="another sampler"):
            sampler.follow(loader)
