"""The forms of a loop, as people write them, and what a plain loop of each form trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, cycle, islice, pairwise, zip_longest
from typing import Any

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from tests.checkpoint.loop_runs import BATCHES, SIZE, Run, data_of


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


def left_by_the_length_of_a_list(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        seen: list[Any] = []
        for x in loader:
            if len(seen) >= 2:
                break
            run.train(x)
            seen.append(x)
        run.end()


def left_at_a_multiple(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for number, x in enumerate(loader, loader.batch):
            run.train(x, number=number)
            run.counted += 1
            if run.counted % 2 == 0:
                break
        run.end()


def left_by_a_function(epochs: Any, loader: Any, run: Run) -> None:
    def enough(losses: list[Any]) -> bool:
        return len(losses) == 3

    for run.epoch in epochs:
        losses: list[Any] = []
        for x in loader:
            if enough(losses):
                break
            run.train(x)
            losses += [x]
        run.end()


def left_by_an_exception(epochs: Any, loader: Any, run: Run) -> None:
    class EnoughError(Exception):
        pass

    for run.epoch in epochs:
        done: list[Any] = []
        with suppress(EnoughError):
            for x in loader:
                if len(done) == 3:
                    raise EnoughError
                run.train(x)
                done.append(x)
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


def by_next_while_there_are_fewer(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        done, batches = 0, iter(loader)
        while done < 2:
            run.train(next(batches))
            done += 1
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


def zipped_with_one_that_is_made_anew(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        others = iter(run.other)
        for x, more in zip(loader, others, strict=False):
            run.train(x, more)
        run.end()


def cycled(epochs: Any, loader: Any, run: Run) -> None:
    for run.epoch in epochs:
        for x in islice(cycle(loader), 2 * BATCHES):
            run.train(x)


def zipped_with_a_cycle(epochs: Any, loader: Any, run: Run) -> None:
    others = cycle(run.other)
    for run.epoch in epochs:
        for x, more in zip(loader, others, strict=False):
            run.train(x, more)


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
    "zipped_with_one_that_is_made_anew": Anew,
    "zipped_with_the_longest": Anew,
    "zipped_with_as_many": lambda: data_of(2),
    "zipped_with_an_endless_one": lambda: data_of(2, BATCHES - 1),
    "zipped_with_fewer": lambda: data_of(2, BATCHES - 1),
    "zipped_with_a_cycle": lambda: [torch.tensor([0])],
    "zipped_with_a_list": lambda: [torch.tensor([n]) for n in range(BATCHES)],
    "zipped_with_a_plain_loader": lambda: DataLoader(range(BATCHES * SIZE), SIZE),  # type: ignore[arg-type]
}
BEHIND = {
    "left_below_the_step",
    "left_at_a_multiple",
}  # A Checkpointer has saved the step before the loop leaves the epoch behind it.
TOLD = {"left_by_a_function", "left_by_an_exception"}  # After three batches: a count that no source shows.
REFUSED = {
    *("left_by_the_length_of_a_list", "by_next_while_there_are_fewer", "zipped_with_one_that_is_made_anew"),
    *("sliced_inside", "left_by_numbers_from_nought", "left_by_its_own_count", "left_by_a_call_in_an_else"),
    *("left_by_return", "left_by_a_count_in_its_condition", "by_next_of_a_number"),
    *("zipped_with_fewer", "zipped_with_a_list", "zipped_with_a_plain_loader", "zipped_with_a_generator"),
    *("zipped_with_the_longest", "in_pairs", "cycled", "zipped_with_a_cycle"),
}
