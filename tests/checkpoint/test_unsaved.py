"""What lives and is not in the state is warned of at the first saves, and right programs are left in peace."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from tqdm import tqdm

from ckpt_tasks import (
    CheckpointConfig,
    Checkpointer,
    LookupTable,
    ReplayBuffer,
    ResumableLoader,
    ResumableSampler,
    resumable,
)
from tests.support.gang import run
from tests.support.sweeps import quick_first

DATA = TensorDataset(torch.arange(8.0).unsqueeze(1))


def trained(steps: int, state: dict[str, Any], place: Path, use: Callable[[], object], loop: Any = None) -> None:
    """Train from where the run is; `use` is called in each step, and `loop` is what the loop has in a variable."""
    model, optimizer = state["model"], state["optimizer"]
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(place), step_interval=1, memory_dir=None)) as ckpt:
        for step in range(ckpt.restore(state) + 1, steps + 1):
            model(torch.ones(1, 1)).sum().backward()
            use()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step, state)
    assert loop is not state


def training() -> dict[str, Any]:
    model = nn.Linear(1, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def scaled(state: dict[str, Any], scaler: Any) -> None:
    scaler.scale(torch.ones(()))
    scaler.step(state["optimizer"])
    scaler.update()


KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    "GradScaler": (lambda state: torch.amp.GradScaler("cpu", init_scale=1.0), scaled),
    "AveragedModel": (lambda state: AveragedModel(state["model"]), lambda s, one: one.update_parameters(s["model"])),
    "LookupTable": (lambda state: LookupTable(1), lambda state, one: one.step()),
    "ReplayBuffer": (lambda state: ReplayBuffer(9, x=float), lambda state, one: one.append(x=0.5)),
    "Generator": (lambda state: torch.Generator(), lambda state, one: torch.rand(1, generator=one)),
    "numpy": (lambda state: np.random.default_rng(0), lambda state, one: one.random()),
    "RandomState": (lambda state: np.random.RandomState(0), lambda state, one: one.random_sample()),
}


class Box:
    """An object of the user's that saves what it holds, in its own way."""

    def __init__(self, held: Any):
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"saved": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""


WAYS = ["forgotten", "attribute", "saved", "boxed", "elsewhere", "unused", "of another"]
QUICK = {*product(["GradScaler", "Generator"], ["forgotten"]), *product(["AveragedModel"], WAYS)}


@pytest.mark.parametrize(
    ("kind", "way"),
    [pytest.param(*one, marks=[] if one in QUICK else pytest.mark.slow) for one in product(KINDS, WAYS)],
)
def test_a_live_object_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, way: str) -> None:
    """P1: in a variable of the loop or its attribute; not if saved, in a stateful or another run, or unused."""
    state, others = training(), ModuleType("others")
    make, use = KINDS[kind]
    others.live = make(state)  # type: ignore[attr-defined]
    live = None if way == "elsewhere" else others.live
    if way in ("saved", "boxed"):
        state["it"] = live if way == "saved" else Box(live)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        loop = SimpleNamespace(parts=[live]) if way == "attribute" else live
        config = CheckpointConfig(checkpoint_dir=str(tmp_path / "other"), memory_dir=None)
        with Checkpointer(config) as other:
            count = itertools.count(1)
            trained(
                4,
                state,
                tmp_path / "this",
                lambda: (
                    way == "unused" or use(state, others.live),
                    way == "of another" and other.save(next(count), {"it": live}),
                ),
                loop,
            )
    loud = way in ("forgotten", "attribute") or (way == "unused" and kind == "AveragedModel")
    name = "loop.parts[0]" if way == "attribute" else "loop"
    assert [text.startswith(f"{name} (") for text in caplog.messages] == [True] * loud, caplog.messages


def test_reseeded_and_dead_objects_are_no_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P1: a generator that is seeded in every step, one of a loader in the loop, and what is gone are not missed."""
    state, live = training(), torch.Generator()
    loader = DataLoader(DATA, generator=torch.Generator())
    seeds = iter(range(9))
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        trained(4, state, tmp_path / "a", lambda: torch.rand(1, generator=live.manual_seed(next(seeds))), live)
        trained(4, state, tmp_path / "b", lambda: [*loader], [loader.generator, loader])
        trained(4, state, tmp_path / "c", lambda: torch.rand(1, generator=torch.Generator()))
    assert caplog.messages == []


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 1.0), (0.9, 1.0), (0.0, 0.5)])
def test_an_optimizer_that_holds_nothing_is_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, momentum: float, decay: float
) -> None:
    """P1: SGD without momentum is missed only once its rate is another than it was made with."""
    state = training()
    outside = torch.optim.SGD(state.pop("optimizer").param_groups[0]["params"], lr=0.1, momentum=momentum)

    def use() -> None:
        outside.step()
        outside.param_groups[0]["lr"] *= decay

    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        trained(2, {**state, "optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)])}, tmp_path, use)
    missed = [text.startswith("The SGD of model is not in the state") for text in caplog.messages]
    assert sum(missed) == (momentum > 0 or decay < 1), caplog.messages


def test_an_option_that_is_an_array_makes_no_save_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P1: an optimizer outside the state may have any options: arrays cannot be compared as numbers are."""
    state = training()
    outside = torch.optim.SGD(state.pop("optimizer").param_groups[0]["params"], lr=0.1)
    outside.defaults["rates"] = outside.param_groups[0]["rates"] = np.ones(2)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        trained(
            2, {**state, "optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)])}, tmp_path, outside.step
        )
    assert sum(text.startswith("The SGD of model is not in the state") for text in caplog.messages) == 1


@pytest.mark.parametrize("held", ["nowhere", "frozen", "listed", "boxed"])
def test_an_optimizer_whose_parameters_are_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, held: str
) -> None:
    """P1: moments without their parameters are warned of, unless a value or a stateful has them, or nothing trains."""
    alpha = torch.zeros(3, requires_grad=held != "frozen")
    more: dict[str, dict[str, Any]] = {"listed": {"alpha": [alpha]}, "boxed": {"box": Box(alpha)}}
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        trained(2, {**training(), "alphas": torch.optim.Adam([alpha]), **more.get(held, {})}, tmp_path, lambda: None)
    said = ["alphas trains 1 parameters that are not in the state (shapes [3])" in text for text in caplog.messages]
    assert said == [True] * (held == "nowhere")


@pytest.mark.parametrize("kind", quick_first(["AveragedModel", "Generator", "numpy"]))
@pytest.mark.parametrize("is_saved", [False, True])
def test_what_a_loop_of_two_lines_forgets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, is_saved: bool
) -> None:
    """P1: what a plain loop is told of its variables is told in a loop of `resumable`, also in a progress bar."""
    (make, use), state = KINDS[kind], training()
    live = make(state)
    more = {"live": live} if is_saved else {}
    config = CheckpointConfig(checkpoint_dir=str(tmp_path), step_interval=1, memory_dir=None)
    loader, epochs = resumable(config, DataLoader(DATA, batch_size=2), 1, **state, **more)
    for _ in epochs:
        for (x,) in tqdm(loader, disable=None):
            state["model"](x).sum().backward()
            use(state, live)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
    assert [text.startswith("live (") for text in caplog.messages] == [True] * (not is_saved)


class PartOf(Sampler[int]):
    """A sampler of the user's that shuffles a rank's part."""

    def __init__(self) -> None:
        self.num_replicas, self.rank, self.seed = 2, 0, 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


class FromAStart(DistributedSampler[Any]):
    """One that the loop tells where to begin."""

    start_index = 0

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.start_index = 2

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.start_index, None)


class InOrder(Sampler[int]):
    """One with an order of its own, of all samples or of a rank's part, that it begins with each epoch."""

    def __init__(self, part: range):
        self.part = part

    def __iter__(self) -> Iterator[int]:
        return iter(self.part)

    def __len__(self) -> int:
        return len(self.part)


class Drawing(Sampler[Any]):
    """A sampler of the user's that draws an order of its own; `begin`: the loop tells it where to begin."""

    def __init__(self, batch_size: int = 0, begin: int | None = None):
        self.batch_size = batch_size
        if begin is not None:
            self.begin = begin

    def __iter__(self) -> Iterator[Any]:
        order: list[int] = torch.randperm(len(DATA)).tolist()
        return iter([order[:4], order[4:]] if self.batch_size else order)

    def __len__(self) -> int:
        return 2 if self.batch_size else len(DATA)


CHANCES = WeightedRandomSampler([1.0] * 8, 8)


@pytest.mark.parametrize(
    ("said", "sampler", "batch_size"),
    quick_first(
        [
            ("WeightedRandomSampler", CHANCES, 2),
            ("SubsetRandomSampler", SubsetRandomSampler(range(4)), 2),
            ("WeightedRandomSampler", BatchSampler(CHANCES, 2, False), 0),
            ("shuffle=True", BatchSampler(RandomSampler(DATA), 2, False), None),
            ("DistributedSampler", DistributedSampler(DATA, 2, 0), 2),
            ("PartOf", PartOf(), 2),
            ("Drawing", Drawing(), 2),
            ("Drawing", BatchSampler(Drawing(), 2, False), 0),
            ("Drawing", Drawing(4), 0),
            ("", Drawing(begin=0), 2),
            ("", DistributedSampler(DATA, 2, 0, shuffle=False), 2),
            ("", FromAStart(DATA, 2, 0), 2),
            ("", BatchSampler(SequentialSampler(DATA), 2, False), 0),
            ("", ResumableSampler(8, 2), 0),
            ("", None, 2),
        ],
        4,
    ),
)
def test_every_sampler_that_draws(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str, sampler: Any, batch_size: int | None
) -> None:
    """P22: a plain loader with any sampler that draws, itself or in a batch sampler, is named; another one is not."""
    how = {"sampler": sampler, "batch_size": batch_size} if batch_size != 0 else {"batch_sampler": sampler}
    loader: DataLoader[Any] = DataLoader(DATA, **how)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        trained(2, training(), tmp_path, lambda: [*loader])
    assert [f"A DataLoader with {said} keeps no position" in text for text in caplog.messages] == [True] * bool(said)


@pytest.mark.parametrize(
    ("sampler", "batch_size"),
    [(None, 2), (DistributedSampler(DATA, 2, 0, shuffle=False), 1), (InOrder(range(7, -1, -1)), 2)],
)
@pytest.mark.parametrize(
    ("stop", "begin", "beside"),
    quick_first([(3, 0, False), (3, 3, False), (4, 0, False), (3, 0, True), (3, 3, True), (4, 0, True)], 4),
)
def test_an_epoch_that_begins_again(  # noqa: PLR0917
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stop: int,
    begin: int,
    beside: bool,
    sampler: Any,
    batch_size: int,
) -> None:
    """P22: a plain loader that starts an epoch again is warned of; one that skips, or that had ended it, is not.

    The same for a second loader beside one that resumes, for a rank's part, and for an order of the program's own.
    """
    loader = DataLoader(DATA, batch_size=batch_size, sampler=sampler)
    more = {"data": ResumableLoader(DATA, batch_size=2)} if beside else {}
    batches: list[Iterator[Any]] = [iter(())]

    def draw() -> None:
        if next(batches[0], None) is None:
            batches[0] = iter(loader)
            next(batches[0])

    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        trained(stop, {**training(), **more}, tmp_path, draw)
        batches[0] = islice(loader, begin, None)
        trained(6, {**training(), **more}, tmp_path, draw)
    assert ["samples come twice" in text for text in caplog.messages] == [True] * ((stop, begin) == (3, 0))


class Unsized(Dataset[int]):
    """The data of a file that is read by place: it does not know how many there are."""

    def __getitem__(self, index: int) -> int:
        return index


class Uncounted(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize(("data", "sampler"), [(Unsized(), InOrder(range(8))), (DATA, Uncounted())])
def test_a_loader_without_a_length_is_no_hindrance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: Any, sampler: Any
) -> None:
    """A DataLoader asks neither its data set nor its sampler for a length: a save after a resume does not either."""
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        for stop in (3, 5):
            batches = iter(DataLoader(data, batch_size=2, sampler=sampler))
            trained(stop, training(), tmp_path, lambda batches=batches: next(batches))  # type: ignore[misc]
    assert caplog.messages == []


def again(rank: int, size: int, place: str, count: int) -> list[str]:
    """Stop in an epoch and begin it again, with a sampler that gives this rank `count` samples; return what is said."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt_tasks").addHandler(handler)
    for steps in (1, 2):
        batches = iter(DataLoader(DATA, batch_size=1, sampler=InOrder(range(rank, len(DATA), size)[:count])))
        trained(steps, training(), Path(place), lambda batches=batches: next(batches))  # type: ignore[misc]
    return [message for message in messages if "samples come twice" in message]


def said_to(rank: int, size: int, place: str) -> list[int]:
    return [len(again(rank, size, f"{place}/{count}", count)) for count in (4, 3)]


def test_a_part_of_a_rank_that_begins_again(tmp_path: Path) -> None:
    """P22: a sampler that deals the data out by names of its own is warned of; a list of what is left is not."""
    assert run(2, said_to, str(tmp_path)) == [[1, 0]] * 2
