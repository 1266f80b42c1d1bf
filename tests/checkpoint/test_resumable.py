"""Two lines in any loop: what `resumable` saves, when, and what ends it."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader, open_run, resumable
from ckpt_tasks.checkpoint.transfer.comparison import compare_checkpoints
from ckpt_tasks.errors import ConfigError
from tests.support.children import Child
from tests.support.sweeps import quick_first
from tests.support.waiting import until

Death = tuple[int, int | None, str]
EPOCHS, BATCHES, ACCUMULATED = 3, 7, 2
# Where a process dies: (epoch, batch, place in the loop); batch None: at the end of the epoch.
DEATHS: list[Death] = [
    (0, 0, "batch"),
    (0, 5, "backward"),
    (0, 6, "stepped"),
    (0, None, "end"),
    (1, None, "ended"),
    (2, 6, "stepped"),
]


def train(run: Path, at: Callable[[int, int | None, str], None] = lambda *_: None, **options: Any) -> list[float]:
    """A loop with accumulation over two of seven batches, dropout, and a schedule that steps where an epoch ends."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (its stream is compared)
    torch.manual_seed(0)
    loader: Any = DataLoader(TensorDataset(torch.randn(7 * 4, 8)), batch_size=4, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    config = CheckpointConfig(checkpoint_dir=run, **{"step_interval": 2, "keep_every_n_steps": 1, **options})
    loader, epochs = resumable(config, loader, range(EPOCHS), model=model, optimizer=optimizer, schedule=schedule)
    for epoch in epochs:
        for number, (x,) in enumerate(loader, loader.batch):
            at(epoch, number, "batch")
            loss = model(x).square().mean() / ACCUMULATED
            loss.backward()
            at(epoch, number, "backward")
            if number % ACCUMULATED or number == BATCHES - 1:
                optimizer.step()
                optimizer.zero_grad()
            epochs.log(loss=loss.item())
            at(epoch, number, "stepped")
        at(epoch, None, "end")
        schedule.step()
        at(epoch, None, "ended")
    return [group["lr"] for group in optimizer.param_groups]


def job(arguments: Sequence[str]) -> None:
    run, epoch, batch, place = arguments
    death = (int(epoch), None if batch == "None" else int(batch), place)
    train(Path(run), lambda *here: os.kill(os.getpid(), signal.SIGKILL) if here == death else None)


def last(run: Path) -> Any:
    return open_run(run).checkpoints()[0]


def differences(one: Path, other: Path) -> list[Any]:
    """What the last checkpoints of two runs differ in."""
    a, b = open_run(one).history.store, open_run(other).history.store
    compared = compare_checkpoints(a, last(one), b, last(other))
    assert last(one).step == last(other).step
    return [*compared.differences]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    train(run)
    return run


@pytest.mark.parametrize("deaths", quick_first([(DEATHS[1::2],), (DEATHS,)]), ids=len)
def test_a_loop_of_two_lines_goes_on_bit_for_bit(whole: Path, run_dir: Path, deaths: list[Death]) -> None:
    """Killed again and again, anywhere in an epoch and at its end, it ends as one that nobody killed."""
    for number, death in enumerate(deaths):
        with Child(job, [str(run_dir), *map(str, death)], run_dir.with_name(f"said{number}")) as child:
            assert child.wait(120) == -signal.SIGKILL, child.said()
    assert train(run_dir) == [0.1 * 0.5**EPOCHS]
    assert differences(whole, run_dir) == []


def test_a_loop_that_an_exception_leaves_releases_the_run(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After the exception another start goes on at once, and the steps that no save was due for are named."""

    def at(epoch: int, batch: int | None, place: str) -> None:
        if (epoch, batch, place) == (0, 6, "batch"):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(run_dir, at)
    gc.collect()
    assert "steps 3 to 3 are not saved" in caplog.text
    owner = open_run(run_dir).history.head().state.owner
    assert owner is not None
    assert owner.released
    assert train(run_dir) == [0.1 * 0.5**EPOCHS]


def blocks(run: Path) -> Iterator[int]:
    """A loop in a generator, whose block ends when the generator is freed."""
    model = torch.nn.Linear(8, 1)
    with Checkpointer(CheckpointConfig(checkpoint_dir=run, step_interval=2)) as ckpt:
        for step in range(ckpt.restore({"model": model}) + 1, 100):
            ckpt.step(step, {"model": model})
            yield step


def left_in_two_lines(run: Path) -> None:
    def at(*here: object) -> None:
        if here == (0, 6, "batch"):  # The save of step 2 is under way.
            raise InterruptedError

    try:
        train(run, at)
    except InterruptedError as error:
        mine: list[Any] = [error]  # Its frames, and so the loop, are freed by a collection alone.
        mine.append(mine)


def left_in_a_block(run: Path) -> None:
    loop = blocks(run)
    mine = [loop, *(next(loop) for _ in range(2))]
    mine.append(mine)


@pytest.mark.parametrize("left", quick_first([left_in_two_lines, left_in_a_block]))
def test_a_loop_that_is_garbage_is_collected_by_the_thread_that_saves_for_it(
    left: Callable[[Path], None], run_dir: Path
) -> None:
    """P33: that thread waits for no save, which would be for itself: the save is committed, and a start goes on."""
    collected = list[int]()

    def collect(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "prepare_part":  # Between a save's digests and its commit.
            is_left.wait(60)
            collected.append(gc.collect())

    is_left = threading.Event()
    threading.setprofile(collect)
    gc.disable()  # Only that thread collects.
    try:
        left(run_dir)
        threading.setprofile(None)
        is_left.set()
        until(lambda: open_run(run_dir).checkpoints())
    finally:
        threading.setprofile(None)
        gc.enable()
    assert collected
    assert last(run_dir).step == 2
    if left is left_in_two_lines:
        assert train(run_dir) == [0.1 * 0.5**EPOCHS]
    else:
        assert next(blocks(run_dir)) == 3


def test_ctrl_c_ends_the_loop_after_the_step_with_a_commit(run_dir: Path, whole: Path) -> None:
    """A signal in the loop waits for the end of the step, is committed, and the next start goes on bit for bit."""
    with pytest.raises(KeyboardInterrupt):
        train(run_dir, lambda *here: os.kill(os.getpid(), signal.SIGINT) if here == (1, 1, "batch") else None)
    assert last(run_dir).step == 5
    assert train(run_dir) == [0.1 * 0.5**EPOCHS]
    assert differences(whole, run_dir) == []


def test_ctrl_c_acts_at_once_after_an_exception_has_left_the_loop(run_dir: Path) -> None:
    """A cell whose loop has raised still has its names: no Ctrl-C of a later cell is held back."""
    loop = cell(run_dir)
    with pytest.raises(InterruptedError):
        left_at_once(loop)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    loop.epochs.leave()


def test_a_cell_that_runs_again_takes_the_run_from_the_loop_before(run_dir: Path) -> None:
    """The names of the cell hold the loop before: a second `resumable` of the same run ends it first."""
    before = cell(run_dir)
    with pytest.raises(InterruptedError):
        left_at_once(before)
    again = cell(run_dir, range(1, 6, 2))
    assert [epoch for epoch in again.epochs for _ in again.loader] == [1] * 4 + [3] * 4 + [5] * 4
    assert (again.epochs.step, last(run_dir).step) == (12, 12), "without an optimizer every batch is a step"
    assert [*before.epochs] == []


def test_an_epoch_that_a_break_leaves_is_over(run_dir: Path) -> None:
    """The next epoch begins with its first batch, also after a resume at the last step of the epoch that was left."""

    def seen(epochs: int) -> list[tuple[int, float]]:
        loop, batches = cell(run_dir / "again", epochs=epochs), []
        for epoch in loop.epochs:
            for (x,) in loop.loader:
                batches.append((epoch, x.item()))
                if len(batches) % 2 == 0:
                    break
        return batches

    with_a_break = seen(2) + seen(3)
    loop, batches = cell(run_dir, epochs=3), []
    for epoch in loop.epochs:
        batches += [(epoch, x.item()) for (x,) in loop.loader][:2]
    assert with_a_break == batches


def test_a_loop_that_leaves_the_run_behind_its_save_loses_nothing(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`save` counts the batch that the loop is at; after `leave`, or an exception, the next start goes on behind it."""
    for first in (0, 1, 2):
        loader, epochs = resumable(str(run_dir), DataLoader(TensorDataset(torch.arange(4.0))), 1)
        with suppress(InterruptedError):
            for _ in epochs:
                for number, (x,) in enumerate(loader, loader.batch):
                    assert (number, x.item()) == (first, first)
                    epochs.save()
                    if first == 1:
                        raise InterruptedError
                    break
                epochs.leave()
                break
        epochs.leave()
    assert (last(run_dir).step, caplog.text) == (3, "")


@pytest.mark.parametrize("form", quick_first(["break", "bar", "return"]))
def test_a_loop_that_a_break_leaves_behind_its_save_has_ended(
    form: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An early stop is the end of the run: the same command trains nothing and says so, and more epochs train on."""

    def train(epochs_in_all: int, stop: int | None) -> int:
        loop, steps = cell(run_dir, epochs_in_all), 0
        for _ in tqdm(loop.epochs, disable=True) if form == "bar" else loop.epochs:
            for _ in loop.loader:
                steps += 1
                if steps == stop:
                    break
            if steps == stop:
                loop.epochs.save()
                if form == "return":
                    return steps
                break
        return steps

    assert (train(3, 6), caplog.text) == (6, "")
    gc.collect()
    assert train(3, None) == 0
    assert "Nothing was left to train" in caplog.text
    assert last(run_dir).step == 6
    assert train(4, None) == 4


def test_batches_that_are_numbered_anew_are_warned_of(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a restored epoch `enumerate` begins at 0 behind the batches before it; with the loader's batch it is right."""
    with pytest.raises(InterruptedError):
        left_at_once(cell(run_dir), batches=3)
    numbers, loop = [], cell(run_dir)
    for _ in loop.epochs:
        numbers += [number for number, _ in enumerate(loop.loader, loop.loader.batch)]
        break
    assert (numbers, caplog.text.count("enumerate begins")) == ([2, 3], 0)
    loop = cell(run_dir)
    for _ in loop.epochs:
        for number, _ in enumerate(loop.loader):
            numbers.append(number)
    assert (numbers, caplog.text.count("enumerate begins")) == ([2, 3, 0, 0, 1, 2, 3], 1)


@pytest.mark.parametrize(("two_lines", "is_off"), quick_first(product([False, True], [False, True]), 3))
def test_a_bar_in_a_variable_is_told_of_its_numbers(
    two_lines: bool, is_off: bool, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`enumerate` over a progress bar that was made before it begins at 0 in a restored epoch, and is warned of."""
    one: Any = ResumableLoader(TensorDataset(torch.arange(4.0)))
    one.load_state_dict(one.state_dict() | {"samples": 2})
    with Checkpointer(CheckpointConfig(checkpoint_dir=run_dir)) as ckpt:
        ckpt.save(2, {"data": one})
    loader, epochs = resumable(str(run_dir), one, 2) if two_lines else (one, one.epochs(2))
    numbers = []
    for _ in epochs:
        bar = tqdm(loader, disable=is_off)
        for number, _ in enumerate(bar):
            numbers.append(number)
    assert (numbers, caplog.text.count("enumerate begins")) == ([0, 1, 0, 1, 2, 3], 1)


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (lambda data: DataLoader(data, sampler=WeightedRandomSampler([1.0] * 4, 4)), "WeightedRandomSampler"),
        (lambda data: DataLoader(data, sampler=RandomSampler(data, replacement=True)), "more than once"),
        (lambda data: DataLoader(data, batch_size=None), "batches"),
        (lambda data: DataLoader(Stream()), "no state_dict and load_state_dict"),
        (StatefulDataLoader, "StatefulDataLoader"),
    ],
)
def test_a_loader_whose_order_is_its_own_is_refused(loader: Callable[[Any], Any], says: str, run_dir: Path) -> None:
    """Nothing is guessed of an order that cannot be resumed, and nothing is written."""
    with pytest.raises(ConfigError, match=says):
        resumable(str(run_dir), loader(TensorDataset(torch.arange(4.0))), range(2))
    assert not run_dir.exists()


def test_other_arguments_that_would_train_something_else_are_refused(run_dir: Path) -> None:
    """A name that is the loader's, values of other types, and a loader without its epochs."""
    loader = ResumableLoader(TensorDataset(torch.arange(4.0)))
    with pytest.raises(ConfigError, match="is the loader's"):
        resumable(str(run_dir), loader, range(3), data=1)
    wrong: list[tuple[Any, Any, Any]] = [(1, loader, 1), (str(run_dir), [1], 1), (str(run_dir), loader, "3")]
    for arguments in wrong:
        with pytest.raises(ConfigError, match="got"):
            resumable(*arguments)
    assert not run_dir.exists()
    loader_again, epochs = resumable(str(run_dir), loader, 3)
    with pytest.raises(ConfigError, match="for epoch in epochs"):
        next(iter(loader_again))
    epochs.leave()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


def left_at_once(loop: Loop, batches: int = 1) -> None:
    for _ in loop.epochs:
        for number, _ in enumerate(loop.loader, 1):
            if number == batches:
                raise InterruptedError


class Loop(NamedTuple):
    loader: Any
    epochs: Any


def cell(run: Path, epochs: int | range = 2) -> Loop:
    """A loop over four numbers that saves every step."""
    data = DataLoader(TensorDataset(torch.arange(4.0)), shuffle=True)
    return Loop(*resumable(CheckpointConfig(checkpoint_dir=run, step_interval=1), data, epochs))


@pytest.mark.parametrize("times", [0, 2])
def test_an_epoch_over_another_loader_is_refused(times: int, run_dir: Path) -> None:
    """Batches from the loader as it was before, or two passes that train, would begin elsewhere after a resume."""
    data: Any = DataLoader(TensorDataset(torch.arange(4.0)))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    loader, epochs = resumable(str(run_dir), data, 2, optimizer=optimizer)

    def train() -> None:
        assert next(epochs) == 0
        for one in (data, *[loader] * times):
            for _ in one:
                optimizer.step()
        next(epochs)

    with pytest.raises(ConfigError, match=f"epoch 0 iterated the loader {times} times"):
        train()
