"""The forms of a loop, as people write them, and what a plain loop of each form trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice, pairwise, zip_longest
from typing import Any

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from ckpt_tasks import ResumableLoader

EPOCHS, BATCHES, SIZE = 2, 4, 2
Place = tuple[int, int | None]  # Of a kill: (epoch, batch), before the batch is trained; None: at the epoch's end.


class Killed(BaseException):
    """The process ends."""


def data_of(seed: int, batches: int = BATCHES, workers: int = 0) -> ResumableLoader:
    data: Any = [*range(100 * seed, 100 * seed + batches * SIZE)]
    return ResumableLoader(data, SIZE, shuffle=True, seed=seed, num_workers=workers)


class Plain:
    """The same batches as a plain loop gets them; `each_pass`: every pass is another epoch."""

    batch = 0

    def __init__(self, loader: ResumableLoader, *, each_pass: bool = False):
        self.order = [[*loader] for _ in range(2 * EPOCHS)]
        self.epoch, self.each_pass = -1, each_pass

    def __len__(self) -> int:
        return len(self.order[0])

    def epochs(self) -> Iterator[int]:
        for self.epoch in range(EPOCHS):
            yield self.epoch

    def __iter__(self) -> Iterator[Any]:
        self.epoch += self.each_pass
        return iter(self.order[self.epoch])


class Run:
    """One training over its starts: what each step trained, and what each other pass has seen."""

    def __init__(self, other: Any = None) -> None:
        self.trained: dict[int, tuple[Any, ...]] = {}
        self.measured: dict[int, list[Any]] = {}
        self.epoch = self.calls = 0
        self.kill: Place | None = None
        self.other = other
        self.step: Callable[[], int] = lambda: self.calls
        self.report: Callable[[], Any] = lambda: None

    def train(self, x: torch.Tensor, more: Any = None, number: int | None = None) -> None:
        """Train a batch as a step; `number`: its number in its epoch, as the loop counts."""
        if self.kill and self.kill == (self.epoch, [one.tolist() for one in PLAIN.order[self.epoch]].index(x.tolist())):
            raise Killed
        now = (x.tolist(), more.tolist() if isinstance(more, torch.Tensor) else more, number)
        assert self.trained.setdefault(self.step() + 1, now) == now
        self.calls += 1
        self.report()

    def measure(self, loader: Iterable[Any]) -> None:
        now = [x.tolist() for x in loader]
        assert self.measured.setdefault(self.epoch, now) == now

    def end(self) -> None:
        """Be where the loop's epoch ends."""
        if self.kill == (self.epoch, None):
            raise Killed


PLAIN = Plain(data_of(1))


def in_order(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for x in loader:
            run.train(x)
        run.end()


def enumerated(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for number, x in enumerate(loader, loader.batch):
            run.train(x, number=number)
        run.end()


def with_bars(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in tqdm(epochs, disable=True):
        bar = tqdm(loader, initial=loader.batch, disable=True)
        for number, x in enumerate(bar, loader.batch):
            run.train(x, number=number)
        run.end()


def sliced(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for x in islice(loader, 3):
            run.train(x)
        run.end()


def sliced_in_a_variable(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        batches = tqdm(islice(tqdm(loader, disable=True), 3), disable=True)
        for x in batches:
            run.train(x)
        run.end()


def sliced_from_its_place(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for x in islice(loader, 3 - loader.batch):
            run.train(x)
        run.end()


def sliced_inside(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for x in islice(loader, 1, None):
            run.train(x)
        run.end()


def left_above_the_step(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for number, x in enumerate(loader, loader.batch):
            if number == 2:
                break
            run.train(x, number=number)
        run.end()


def left_below_the_step(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for number, x in enumerate(loader, loader.batch):
            run.train(x, number=number)
            if number == 2:
                break
        run.end()


def left_by_numbers_from_nought(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for number, x in enumerate(loader):
            if number == 2:
                break
            run.train(x)
        run.end()


def left_by_its_own_count(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        done = 0
        for x in loader:
            if done >= 2:
                break
            run.train(x)
            done += 1  # noqa: SIM113 (the form that is tested)
        run.end()


def left_by_a_call_in_an_else(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for number, x in enumerate(loader):
            if number < min(2, len(loader)):
                run.train(x)
            else:
                break
        run.end()


def left_by_return(epochs: Any, loader: Any, run: Run) -> None:
    def train_epoch() -> None:
        for number, x in enumerate(loader):
            if number == 2:
                return
            run.train(x)

    for run.epoch in epochs:
        train_epoch()
        run.end()


def left_by_a_count_in_its_condition(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        done = 0
        for x in loader:
            if (done := done + 1) > 2:
                break
            run.train(x)
        run.end()


def left_by_its_own_count_from_its_place(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        done = loader.batch
        for x in loader:
            if done >= 2:
                break
            run.train(x)
            done += 1
        run.end()


def never_left(epochs: Any, loader: Any, run: Run) -> None:
    limit: Any = None
    for run.epoch in epochs:
        for number, x in enumerate(loader, 0 if limit else loader.batch):
            run.train(x)
            if (limit and number > limit) or number == len(loader) - 1:
                break
        run.end()


def passing_over(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for number, x in enumerate(loader, loader.batch):
            if number == 1:
                continue
            run.train(x, number=number)
        run.end()


def measured_behind(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for x in loader:
            run.train(x)
        run.measure(loader)
        run.end()


def measured_inside(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for number, x in enumerate(loader, loader.batch):
            if number % 2:
                run.measure(loader)
            run.train(x)
        next(iter(loader))
        run.end()


def by_next(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        batches = iter(loader)
        while (x := next(batches, None)) is not None:
            run.train(x)
        run.end()


def by_next_from_its_place(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        begin, batches = loader.batch, iter(loader)
        for _ in range(begin, len(loader)):
            run.train(next(batches))
        run.end()


def by_next_of_its_length(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        batches = iter(loader)
        for _ in range(len(loader)):
            run.train(next(batches))
        run.end()


def by_next_of_a_number(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        batches = iter(loader)
        for _ in range(2):
            run.train(next(batches))
        run.end()


def zipped_with_numbers(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for number, x in zip(count(loader.batch), loader, strict=False):
            run.train(x, number=number)
        run.end()


def zipped_with_as_many(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for x, more in zip(loader, run.other, strict=False):
            run.train(x, more)
        run.end()


def zipped_with_an_endless_one(epochs: Any, loader: Any, run: Run) -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield from run.other

    others = endless()
    for run.epoch in epochs:
        for x, more in zip(loader, others, strict=False):
            run.train(x, more)
        run.end()


def zipped_with_a_bar(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for x, more in zip(loader, tqdm(run.other, disable=True), strict=False):
            run.train(x, more)
        run.end()


def zipped_with_the_longest(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for x, more in zip_longest(loader, run.other):
            run.train(x, more)
        run.end()


def in_pairs(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for before, x in pairwise(loader):
            run.train(x, before)
        run.end()


class Anew:
    """Others that begin anew at each pass, from a generator."""

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.tensor([number]) for number in range(BATCHES))


zipped_with_fewer = zipped_with_a_list = zipped_with_a_plain_loader = zipped_with_as_many
zipped_with_a_generator = zipped_with_as_many
FORMS = {
    name: form
    for name, form in [*globals().items()]
    if getattr(form, "__code__", None) and form.__code__.co_varnames[:3] == ("epochs", "loader", "run")
}
OTHERS: dict[str, Callable[[], Any]] = {
    "zipped_with_a_bar": lambda: data_of(2),
    "zipped_with_a_generator": Anew,
    "zipped_with_the_longest": Anew,
    "zipped_with_as_many": lambda: data_of(2),
    "zipped_with_an_endless_one": lambda: data_of(2, BATCHES - 1),
    "zipped_with_fewer": lambda: data_of(2, BATCHES - 1),
    "zipped_with_a_list": lambda: [torch.tensor([n]) for n in range(BATCHES)],
    "zipped_with_a_plain_loader": lambda: DataLoader(range(BATCHES * SIZE), SIZE),  # type: ignore[arg-type]
}
BEHIND = {"left_below_the_step"}  # A Checkpointer has saved the step before the loop leaves the epoch behind it.
REFUSED = {
    *("sliced_inside", "left_by_numbers_from_nought", "left_by_its_own_count", "left_by_a_call_in_an_else"),
    *("left_by_return", "left_by_a_count_in_its_condition", "by_next_of_a_number"),
    *("zipped_with_fewer", "zipped_with_a_list", "zipped_with_a_plain_loader", "zipped_with_a_generator"),
    *("zipped_with_the_longest", "in_pairs"),
}
