"""`sample_generator`: numbers that belong to a sample."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from ckpt_tasks import ResumableLoader, sample_generator
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.state.groups import has_any, held_in
from ckpt_tasks.state.tensors.random_streams import GENERATORS
from tests.support.sweeps import quick_first


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
@pytest.mark.parametrize("workers", quick_first([3, 0]))
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
    for some in (dict[str, Any](), {"seed": 1}, {"epoch": 1}):
        with pytest.raises(ConfigError, match=r"sample_generator\(index, seed=…, epoch=…\)"):
            sample_generator(3, **some)


DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "python's second gauss": lambda: random.gauss(0.0, 1.0),
    "numpy": np.random.random,
    "numpy's second gauss": np.random.standard_normal,
    "torch": lambda: float(torch.rand(())),
    "the seed of torch": lambda: float(torch.initial_seed() % 2**20),
}


class Late(Dataset[Any]):
    """Samples that are numbers; from the thirtieth on, every other one has a number that is drawn."""

    def __init__(self, draw: Callable[[], float]):
        self._draw = draw

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), self._draw() if index >= 30 and index % 2 else 0.0], dtype=torch.float64)


@pytest.mark.parametrize(("workers", "odd"), quick_first([(0, ""), (0, "python"), (0, "numpy"), (1, "")], 3))
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_the_first_draw_after_many_batches_without_one_has_its_own_number(
    draw: Callable[[], float], workers: int, odd: str
) -> None:
    """P23, P24: the streams are set where something draws, and are as they were; a resume there draws the same.

    So it is where training draws too, and has left the second of two Gaussian numbers in a stream (`odd`).
    """
    loader = ResumableLoader(Late(draw), 2, seed=5, num_workers=workers)
    batches, before = [], None
    for batch in loader:
        assert before is None or before == global_streams()
        batches.append(batch)
        if len(batches) in (3, 11):
            np.random.standard_normal(2 - (odd == "numpy" and len(batches) > 3))  # noqa: NPY002 (a global stream)
            _ = [random.gauss(0.0, 1.0) for _ in range(2 - (odd == "python" and len(batches) > 3))]
        before = global_streams()
    resumed = ResumableLoader(Late(draw), 2, seed=5)
    resumed.load_state_dict({**loader.state_dict(), "epoch": 0, "samples": 30})
    assert torch.equal(torch.cat(batches[15:]), torch.cat([*resumed]))
    assert len({float(row[1]) for row in torch.cat(batches[15:])}) == 6


def global_streams() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()  # noqa: NPY002 (a global stream)
    return random.getstate(), numpy[1].tobytes(), numpy[2:], torch.get_rng_state().numpy().tobytes()


def of_children(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists, tuples, dicts and objects of these children, some of them longer than a search looks."""
    several = st.lists(children, max_size=3)
    padded = st.tuples(several, several, st.sampled_from([0, 49, 50])).map(lambda x: [*x[0], *[1] * x[2], *x[1]])
    return padded | several.map(tuple) | several.map(lambda x: dict(enumerate(x))) | several.map(Holding)


class Holding:
    """An object with attributes."""

    def __init__(self, held: list[Any]):
        vars(self).update({f"a{n}": one for n, one in enumerate(held)})


LEAVES: list[Any] = [1, "x", None, torch.zeros(1), np.zeros(1), len, int, np, random.Random(1), torch.Generator()]


@given(st.recursive(st.sampled_from(LEAVES), of_children, max_leaves=12))
@example([[[random.Random(1)]]])
@example([[[[random.Random(1)]]]])
def test_the_quick_search_finds_what_the_search_with_names_finds(value: Any) -> None:
    """P24: a generator that the data set holds, however deep, is never overlooked where batches are made quickly."""
    assert has_any(value, GENERATORS) == any(True for _ in held_in(value, GENERATORS))


class Lazy(Dataset[Any]):
    """Samples from a generator that the data set makes at its thirtieth sample, in a list in an object."""

    def __init__(self) -> None:
        self.step = Holding([[]])

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> float:
        held: list[random.Random] = self.step.a0  # type: ignore[attr-defined]
        if index >= 30 and not held:
            held.append(random.Random(7))
        return held[0].random() if held else 0.0


def test_a_generator_that_is_made_late_is_seeded_from_the_next_batch_on() -> None:
    """P24: after many batches without a draw the data set still is searched, at each one."""
    seen = torch.cat([*ResumableLoader(Lazy(), 2, seed=5)])
    assert len(set(seen[30:].tolist())) == 30
    resumed = ResumableLoader(Lazy(), 2, seed=5)
    for index in (30, 31):  # Its generator is where the batch that made it has left it.
        assert resumed.dataset[index] == seen[index]
    resumed.load_state_dict({**resumed.state_dict(), "samples": 40})
    assert torch.equal(torch.cat([*resumed]), seen[40:])
