"""Several loaders in one epoch of a loop, one after the other: killed at each step, it trains as the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, resumable
from ckpt_tasks.testing import MemoryStore, located
from tests.checkpoint.loop_runs import EPOCHS, Killed, Plain, data_of
from tests.support.sweeps import quick_first

Train = Callable[[torch.Tensor], None]


def one_after_the_other(epochs: Any, a: Any, b: Any, c: Any, train: Train) -> None:
    for _ in epochs:
        for x in a:
            train(x)
        for x in b:
            train(x)
        for x in c:
            train(x)


def the_first_last(epochs: Any, a: Any, b: Any, c: Any, train: Train) -> None:
    for _ in epochs:
        for x in b:
            train(x)
        for x in c:
            train(x)
        for x in a:
            train(x)


def in_functions(epochs: Any, a: Any, b: Any, c: Any, train: Train) -> None:
    def pass_over(loader: Any) -> None:
        for x in loader:
            train(x)

    for _ in epochs:
        pass_over(b)
        pass_over(a)
        pass_over(c)


def left_early(epochs: Any, a: Any, b: Any, c: Any, train: Train) -> None:
    for _ in epochs:
        for number, x in enumerate(b, b.batch):
            if number == 1:
                break
            train(x)
        for number, x in enumerate(a, a.batch):
            if number == 2:
                break
            train(x)
        for x in c:
            train(x)


def chained(epochs: Any, a: Any, b: Any, c: Any, train: Train) -> None:
    for _ in epochs:
        for x in chain(a, b, c):
            train(x)


def twice(epochs: Any, a: Any, b: Any, c: Any, train: Train) -> None:
    for _ in epochs:
        for x in chain(c, b, a, b):
            train(x)


def measured_inside(epochs: Any, a: Any, b: Any, c: Any, train: Train) -> None:
    for _ in epochs:
        for x in a:
            train(x)
            assert len([*b]) == len(b)
        for x in c:
            train(x)


def drawn_by_next(epochs: Any, a: Any, b: Any, c: Any, train: Train) -> None:
    def endless(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    more = endless(b)
    for _ in epochs:
        for x in a:
            train(torch.cat([x, next(more)]))
        for x in c:
            train(x)


FORMS = [one_after_the_other, the_first_last, in_functions, left_early, chained, twice, measured_inside, drawn_by_next]


def start(form: Any, kind: str, config: Any, kill: int | None) -> list[list[int]]:
    """Start the program, which goes on from what is saved; return what it trains until it ends, or until `kill`."""
    a, b, c = data_of(1, 3), data_of(2, 2), data_of(3, 2)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    state: dict[str, Any] = {"optimizer": optimizer, "b": b, "c": c}
    trained: list[list[int]] = []

    def train(x: torch.Tensor) -> None:
        if len(trained) == kill:
            raise Killed
        trained.append(x.tolist())
        done()

    try:
        if kind == "resumable":
            done: Callable[[], Any] = optimizer.step
            loader, epochs = resumable(config, a, EPOCHS, **state)
            try:
                form(epochs, loader, b, c, train)
            finally:
                epochs.leave()
            return trained
        state["a"] = a
        with Checkpointer(config) as ckpt:
            ckpt.restore(state)
            done = lambda: ckpt.step(ckpt.position + 1, state)  # noqa: E731
            form(a.epochs(EPOCHS), a, b, c, train)
    except Killed:
        return trained
    return trained


def config_of(store: MemoryStore) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_dir=located(store), step_interval=1, memory_dir=None)


@pytest.mark.parametrize(("form", "kind"), quick_first(product(FORMS, ["loader.epochs", "resumable"]), 5))
def test_loaders_of_one_epoch_go_on_as_in_the_plain_loop(form: Any, kind: str, caplog: Any) -> None:
    """Killed in any of its loops, an epoch is entered again, and the passes that were over yield nothing."""
    plain: list[list[int]] = []
    a, b, c = Plain(data_of(1, 3)), *(Plain(data_of(seed, 2), each_pass=True, passes=2 * EPOCHS * 4) for seed in (2, 3))
    form(a.epochs(), a, b, c, lambda x: plain.append(x.tolist()))
    assert start(form, kind, config_of(MemoryStore()), None) == plain
    for kill in range(1, len(plain), 3 if kind == "loader.epochs" else 5):
        config = config_of(MemoryStore())
        before = start(form, kind, config, kill)
        assert before == plain[:kill]
        after = start(form, kind, config, None)
        assert after == plain[len(plain) - len(after) :], kill
        assert len(after) == len(plain) - kill or (kind == "resumable" and len(after) > len(plain) - kill)
        if kind == "loader.epochs":
            assert start(form, kind, config, None) == []
    assert "below the loop" not in caplog.text


@pytest.mark.parametrize(("steps", "said"), [(0, 0), (1, 0), (2, 1)])
def test_steps_below_the_loop_are_told(steps: int, said: int, caplog: Any) -> None:
    """Steps in an epoch that no loader of the state counts are told once; a save at the end of an epoch is not."""
    a = data_of(1, 3)
    state = {"a": a, "w": torch.zeros(1)}
    with Checkpointer(config_of(MemoryStore())) as ckpt:
        ckpt.restore(state)
        for _ in a.epochs(EPOCHS):
            for _ in a:
                ckpt.step(ckpt.position + 1, state)
            for _ in range(steps):
                ckpt.step(ckpt.position + 1, state)
            ckpt.save(ckpt.position, state)
    assert caplog.text.count("Steps are saved below the loop") == said


@pytest.mark.parametrize(("form", "said"), [("in an epoch", 1), ("in phases", 0), ("by next", 0)])
def test_two_loaders_without_epochs_are_told(form: str, said: int, caplog: Any) -> None:
    """A second loop in an epoch of `range` is warned of once; a loop of a later phase is not."""
    a, b = data_of(1, 3), data_of(2, 2)
    state = {"a": a, "b": b, "w": torch.zeros(1)}
    with Checkpointer(config_of(MemoryStore())) as ckpt:
        ckpt.restore(state)
        others = iter(b)
        for _ in range(EPOCHS):
            for _ in a:
                if form == "by next":
                    next(others, None)
                ckpt.step(ckpt.position + 1, state)
            if form == "in an epoch":
                for _ in b:
                    ckpt.step(ckpt.position + 1, state)
        for _ in range(EPOCHS if form == "in phases" else 0):
            for _ in b:
                ckpt.step(ckpt.position + 1, state)
    assert caplog.text.count("The loop trains with one loader after another") == said
