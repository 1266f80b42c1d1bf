"""A batch that is drawn at a save and trained after it: a resume leaves it out, and the loop is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader
from ckpt_tasks.testing import MemoryStore, located
from tests.support.sweeps import quick_first

EPOCHS = 2


class Program:
    """A model, its optimizer and its data; `step` reports a completed step, as the loop's form does."""

    def __init__(self, ckpt: Checkpointer):
        self.ckpt, self.model = ckpt, nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        samples: Any = [torch.ones(2)] * 12
        self.data, self.other = (ResumableLoader(samples, 2, seed=seed) for seed in (1, 2))
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "data": self.data}

    def train(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).sum().backward()
        self.optimizer.step()

    def step(self) -> None:
        self.ckpt.step(self.ckpt.position + 1, self.state)


def saved_behind(one: Program) -> None:
    for _ in one.data.epochs(EPOCHS):
        for x in one.data:
            one.train(x)
            one.step()


def saved_behind_every_second(one: Program) -> None:
    for _ in one.data.epochs(EPOCHS):
        for number, x in enumerate(one.data, one.data.batch):
            one.model(x).sum().backward()
            if number % 2:
                one.optimizer.step()
                one.optimizer.zero_grad()
                one.step()


def saved_in_accumulation(one: Program) -> None:
    one.state["gradients"] = {"of": one.model.weight.grad}
    for _ in one.data.epochs(EPOCHS):
        for number, x in enumerate(one.data, one.data.batch):
            one.model(x).sum().backward()
            if number % 2:
                one.optimizer.step()
                one.optimizer.zero_grad()
            one.step()


def measured_behind(one: Program) -> None:
    one.state["other"] = one.other
    others = iter(one.other)
    for _ in one.data.epochs(EPOCHS):
        for x in one.data:
            one.train(x)
            if (y := next(others, None)) is not None:
                one.model(y)
            one.step()


def fetched_and_saved(one: Program) -> None:
    one.state["batch"] = {"x": torch.zeros(2)}
    batches = chain.from_iterable(one.data for _ in one.data.epochs(EPOCHS))
    x = next(batches)
    while x is not None:
        one.train(x)
        x = one.state["batch"]["x"] = next(batches, None)
        if x is not None:
            one.step()


def saved_at_the_head(one: Program) -> None:
    for _ in one.data.epochs(EPOCHS):
        for x in one.data:
            one.step()
            one.train(x)


def fetched_ahead(one: Program) -> None:
    batches = chain.from_iterable(one.data for _ in one.data.epochs(EPOCHS))
    x = next(batches)
    while x is not None:
        one.train(x)
        x = next(batches, None)
        one.step()


def trained(form: Callable[[Program], None], interval: int, *, behind: bool = False) -> None:
    """Run a form of a loop; `behind`: train once more after it."""
    config = CheckpointConfig(checkpoint_dir=located(MemoryStore()), step_interval=interval, memory_dir=None)
    with Checkpointer(config) as ckpt:
        one = Program(ckpt)
        ckpt.restore(one.state)
        form(one)
        if behind:
            one.train(torch.ones(2))


RIGHT = [saved_behind, saved_behind_every_second, saved_in_accumulation, measured_behind, fetched_and_saved]


@pytest.mark.parametrize(("form", "said"), [*((form, 0) for form in RIGHT), (saved_at_the_head, 1), (fetched_ahead, 1)])
@pytest.mark.parametrize("interval", quick_first([1, 2]))
def test_a_batch_that_every_save_leaves_out_is_told(
    form: Callable[[Program], None], said: int, interval: int, caplog: pytest.LogCaptureFixture
) -> None:
    """P22: a loop that saves between a batch and its training hears so once; a right loop of any form does not."""
    trained(form, interval)
    assert caplog.text.count("The loop draws a batch, saves, and then trains the batch") == said
    assert len(caplog.messages) <= 1


def saved_behind_each_step(one: Program) -> None:
    for _ in one.data.epochs(EPOCHS):
        for _number, x in enumerate(one.data, one.data.batch):
            for _ in range(3):
                one.train(x)
                one.step()


def fetched_now_and_then(one: Program) -> None:
    for _ in one.data.epochs(EPOCHS):
        batches = iter(one.data)
        while (x := next(batches, None)) is not None:
            for y in (x, torch.ones(2), torch.ones(2)):  # Only one step of three needs a batch.
                one.train(y)
                one.step()


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(12, 2)


def over_a_stream(one: Program) -> None:
    one.data = one.state["data"] = ResumableLoader(Stream(), 2, replay=True)
    saved_behind(one)


BETWEEN = [(saved_behind_each_step, 1), (fetched_now_and_then, 0), (saved_behind, 0), (over_a_stream, 0)]


@pytest.mark.parametrize(("form", "said"), BETWEEN)
@pytest.mark.parametrize("interval", [1, 2])
def test_a_save_between_two_steps_of_a_batch_is_told(
    form: Callable[[Program], None], said: int, interval: int, caplog: pytest.LogCaptureFixture
) -> None:
    """P22: in a `for` over the loader a resume begins with the next batch; what a loop does between next() is its own.

    A step behind the epochs, as a last accumulation, is of no batch.
    """
    trained(form, interval, behind=True)
    assert ["between two steps of one batch" in message for message in caplog.messages] == [True] * said
