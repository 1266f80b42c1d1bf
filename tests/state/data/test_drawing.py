"""`sample_generator`: numbers that belong to a sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from ckpt_tasks import ResumableLoader, sample_generator
from ckpt_tasks.errors import ConfigError


class Augmented(Dataset[Any]):
    """Each sample is its number, and numbers of its own of both kinds."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        ours, of_numpy = sample_generator(index), sample_generator(index, numpy=True)
        assert isinstance(ours, torch.Generator)
        assert isinstance(of_numpy, np.random.Generator)
        return torch.tensor([index, float(torch.rand((), generator=ours)), of_numpy.random()])


def rows(loader: ResumableLoader, epochs: int, stop: int | None = None) -> dict[tuple[int, int], list[float]]:
    """Return each sample's numbers, by epoch and sample."""
    numbers: dict[tuple[int, int], list[float]] = {}
    for epoch in loader.epochs(epochs):
        for at, batch in enumerate(loader, loader.batch):
            numbers.update({(epoch, int(row[0])): row[1:].tolist() for row in batch})
            if at == stop:
                return numbers
    return numbers


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # It has more workers than the host has cores.
@pytest.mark.parametrize("workers", [0, 3])
def test_a_samples_numbers_are_its_own(workers: int) -> None:
    """P23: the same after a stop in an epoch, with any number of workers, ranks and samples in a batch."""
    whole = rows(ResumableLoader(Augmented(), 4, shuffle=True, seed=5), 2)
    assert len({tuple(numbers) for numbers in whole.values()}) == len(whole) == 24
    first = ResumableLoader(Augmented(), 2, shuffle=True, seed=5, num_workers=workers)
    taken = rows(first, 2, stop=3)
    assert len(taken) == 8
    ranks = [
        ResumableLoader(Augmented(), 3, shuffle=True, seed=5, num_workers=workers, rank=rank, world_size=2)
        for rank in range(2)
    ]
    for loader in ranks:
        loader.load_state_dict(first.state_dict())
        taken |= rows(loader, 2)
    assert taken == whole


def test_elsewhere_it_is_told_seed_and_epoch() -> None:
    """P50: outside of a batch nothing says which seed and epoch are meant."""
    one, other = sample_generator(3, seed=5, epoch=1), sample_generator(3, seed=5, epoch=1)
    assert isinstance(one, torch.Generator)
    assert isinstance(other, torch.Generator)
    assert torch.equal(torch.rand(4, generator=one), torch.rand(4, generator=other))
    for given in (dict[str, Any](), {"seed": 1}, {"epoch": 1}):
        with pytest.raises(ConfigError, match=r"sample_generator\(index, seed=…, epoch=…\)"):
            sample_generator(3, **given)
