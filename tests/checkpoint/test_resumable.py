"""Two lines in any loop: what `resumable` saves, when, and what ends it."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

from ckpt_tasks import CheckpointConfig, ResumableLoader, open_run, resumable
from ckpt_tasks.checkpoint.counting import Steps
from ckpt_tasks.copying.compare import compare_checkpoints
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.system import System
from tests.support.children import Child
from tests.support.systems import running_on

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


def test_a_loop_of_two_lines_goes_on_bit_for_bit(whole: Path, run_dir: Path) -> None:
    """Killed again and again, anywhere in an epoch and at its end, it ends as one that nobody killed."""
    for number, death in enumerate(DEATHS):
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


@pytest.mark.parametrize("form", ["break", "bar", "return"])
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


@pytest.mark.parametrize("is_off", [False, True])
@pytest.mark.parametrize("two_lines", [False, True])
def test_a_bar_in_a_variable_is_told_of_its_numbers(
    two_lines: bool, is_off: bool, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`enumerate` over a progress bar that was made before it begins at 0 in a restored epoch, and is warned of."""
    with pytest.raises(InterruptedError):
        left_at_once(cell(run_dir), batches=3)
    loader, epochs = cell(run_dir)
    numbers = []
    for _ in epochs if two_lines else loader.epochs(2):
        bar = tqdm(loader if two_lines else loader._loader, disable=is_off)
        for number, _ in enumerate(bar):
            numbers.append(number)
    epochs.leave()
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


def stepping(run: Path, form: str, batches: int = 12) -> int:
    """Train an epoch in which the optimizer of the state steps as the form says; return the number of steps counted."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    loader, epochs = resumable(run.as_posix(), DataLoader(range(batches)), 2, model=model, optimizer=optimizer)  # type: ignore[arg-type]
    stepped = optimizer
    for epoch in epochs:
        for number, _ in enumerate(loader, loader.batch):
            if form == "replaced" and epoch == 1 and number == 4:
                stepped = torch.optim.SGD(model.parameters())
            if form == "never" or (form == "accumulated" and number % 5 != 4):
                continue
            stepped.step()
    return int(epochs.step)


@pytest.mark.parametrize(
    ("form", "steps", "says"),
    [
        ("never", 0, "taken 12 batches in an epoch"),
        ("replaced", 16, "taken 8 batches since its last step"),
        ("accumulated", 4, ""),
        ("always", 24, ""),
    ],
)
def test_batches_without_a_step_are_told(
    form: str, steps: int, says: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An epoch, or the end of a run, in which no optimizer of the state steps is named once; a rest is right."""
    assert stepping(run_dir, form) == steps
    told = [message for message in caplog.messages if "no optimizer of the state has stepped" in message]
    assert [says in message for message in told] == [True] * bool(says)


class Ticking(System):
    """This machine, whose clock is 40 s later each time."""

    now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 40
        return self.now_s


@pytest.mark.parametrize("form", ["never", "accumulated"])
def test_a_minute_without_a_step_is_told(form: str, run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a long epoch it is named after 60 s; a step that has always taken as many batches is not."""
    counted = Steps(0, counts_batches=False)
    with running_on(Ticking()):
        for number in range(12):
            counted.handed_out()
            if form == "accumulated" and number % 2:
                counted.note()
            counted.end()
    assert ["batches in" in message for message in caplog.messages] == [True] * (form == "never")


FIXED: list[Any] = [0.0, 3, "adam", None, (1, 2), np.float32(1)]


@pytest.mark.parametrize("value", FIXED, ids=repr)
def test_a_value_that_cannot_change_in_place_is_refused(value: Any, run_dir: Path) -> None:
    """Each save would hold its first value: nothing is written, and the error says what works."""
    with pytest.raises(ConfigError, match=r"first value \(at best\)\. Give a dict, best=best"):
        resumable(str(run_dir), DataLoader(TensorDataset(torch.arange(4.0))), 2, best=value)
    assert not run_dir.exists()


@pytest.mark.parametrize("form", ["rebound", "rebound tensor", "in place"])
def test_a_value_that_the_loop_gives_a_new_object_is_refused(form: str, run_dir: Path) -> None:
    """A list or tensor that the loop assigns anew is refused by its name; one that it changes in place is restored."""
    losses: list[float] = []
    sums, model = torch.zeros(1), torch.nn.Linear(1, 1)

    def rebinding(losses: list[float]) -> None:
        _, epochs = resumable(str(run_dir), DataLoader(TensorDataset(torch.arange(4.0))), 2, losses=losses)
        for _ in epochs:
            losses = [*losses, 1.0]

    def rebinding_a_tensor(sums: torch.Tensor) -> None:
        _, epochs = resumable(str(run_dir), DataLoader(TensorDataset(torch.arange(4.0))), 2, sums=sums)
        for _ in epochs:
            sums = sums + 1

    def in_place(losses: list[float], sums: torch.Tensor, model: Any) -> None:
        pair = (sums, [1.0])
        loader, epochs = resumable(
            str(run_dir),
            DataLoader(TensorDataset(torch.arange(4.0))),
            2,
            losses=losses,
            sums=sums,
            model=model,
            pair=pair,
        )
        for _ in epochs:
            for (x,) in loader:
                losses += [x.item()]
                sums += x
            model = torch.nn.Sequential(model)
        losses = [sum(losses)]

    if form == "in place":
        in_place(losses, sums, model)
        assert (len(losses), sums.item()) == (8, 12.0)
        return
    with pytest.raises(ConfigError, match=r"the loop gives (losses|sums) a new object"):
        rebinding(losses) if form == "rebound" else rebinding_a_tensor(sums)
    assert not run_dir.exists()
