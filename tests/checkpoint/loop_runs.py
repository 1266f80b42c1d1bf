"""What the forms of a loop are run with: the data, a plain loader in its place, and what each step has trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

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

    def __init__(self, loader: ResumableLoader, *, each_pass: bool = False, passes: int = 2 * EPOCHS):
        self.order = [[*loader] for _ in range(passes)]
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
        self.epoch = self.calls = self.counted = 0
        self.kill: Place | None = None
        self.order = PLAIN.order
        self.other = other
        self.step: Callable[[], int] = lambda: self.calls
        self.report: Callable[[], Any] = lambda: None

    def train(self, x: torch.Tensor, more: Any = None, number: int | None = None) -> None:
        """Train a batch as a step; `number`: its number in its epoch, as the loop counts."""
        if self.kill and self.kill == (self.epoch, [one.tolist() for one in self.order[self.epoch]].index(x.tolist())):
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
