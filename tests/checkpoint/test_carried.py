"""Gradients that are accumulated over a save are named, where a step takes them; gradients left behind are not."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_tasks import CheckpointConfig, Checkpointer, Gradients, resumable
from tests.support.sweeps import quick_first

ROWS = torch.arange(24.0).view(12, 2) / 24
STEPS = ("plain", "fused", "compiled")
SAID = "The gradients of late were accumulated over a save at step"


class Training:
    """Two modules with an optimizer each; the second one steps in a form of its own."""

    def __init__(self, form: str, *, with_gradients: bool = False):
        torch.manual_seed(0)
        self.form, self.early, self.late = form, nn.Linear(2, 2), nn.Linear(2, 1)
        first = torch.optim.SGD(self.early.parameters(), lr=0.1)
        kind: Any = torch.optim.LBFGS if form == "closure" else torch.optim.SGD
        second = kind(self.late.parameters(), lr=0.1)
        self.state = {"first": self.early, "second": self.late, "early": first, "late": second}
        self.state |= {"gradients": Gradients(self.late)} if with_gradients else {}
        self.optimizers = (first, second)

    def loss(self, x: torch.Tensor) -> Any:
        return self.late(self.early(x)).square().sum()

    def batch(self, number: int, x: torch.Tensor) -> None:
        """Train a batch as a right program of this form does; the second optimizer steps in every fourth one."""
        early, late = self.optimizers
        is_fourth = number % 4 == 3
        early.zero_grad()
        if self.form == "in both":
            late.zero_grad()
        self.loss(x).backward()  # It has gradients for both.
        early.step()
        if self.form == "by hand":
            late.zero_grad()
            for parameter in self.late.parameters():
                parameter.grad = torch.ones_like(parameter)
            late.step()
        elif self.form in ("accumulated", "in both", "never zeroed"):
            if is_fourth or self.form != "accumulated":
                late.step()
            if self.form == "in both" or (is_fourth and self.form == "accumulated"):
                late.zero_grad()
        elif self.form == "frozen":
            if number == 0:
                late.step()
                self.late.requires_grad_(False)
        elif self.form == "closure":
            late.step(lambda: (late.zero_grad(), (loss := self.loss(x)).backward(), loss)[-1])
        elif is_fourth:  # What the first one's loss has left is dropped where it would be in the way.
            late.zero_grad(set_to_none=self.form == "dropped")
            for _ in range(2):
                self.loss(x).backward()
            late.step()
            late.zero_grad(set_to_none=self.form == "dropped")


class Climbing(Training):
    def batch(self, number: int, x: torch.Tensor) -> None:
        """Train a batch as SAM does."""
        weights: list[Any] = [*self.late.parameters()]
        climb: Any = torch.autograd.grad(self.loss(x), weights)
        with torch.no_grad():
            torch._foreach_add_(weights, climb)
        self.optimizers[1].zero_grad()
        self.loss(x).backward()
        with torch.no_grad():
            torch._foreach_add_(weights, climb, alpha=-1)
        self.optimizers[1].step()


def trained(run: Path, form: str, adopted: str, *, with_gradients: bool = False, stop: int = 0) -> torch.Tensor:
    """Train 24 batches, or fail behind the save of step `stop`; return the second module's weights."""
    training = (Climbing if form == "climbing" else Training)(form, with_gradients=with_gradients)
    config = CheckpointConfig(checkpoint_dir=str(run), step_interval=1, memory_dir=None)
    if adopted == "two lines":
        loader, epochs = resumable(config, DataLoader(TensorDataset(ROWS)), 2, **training.state)
        for epoch in epochs:
            for number, (x,) in enumerate(loader, loader.batch):
                training.batch(number, x)
                if epoch * 12 + number + 1 == stop:
                    epochs.save()
                    raise InterruptedError
    else:
        with Checkpointer(config) as ckpt:
            for number in range(ckpt.restore(training.state), 24):
                training.batch(number, ROWS[number % 12])
                ckpt.step(number + 1, training.state)
                if number + 1 == stop:
                    raise InterruptedError
    return training.late.weight.detach()


@pytest.mark.parametrize(
    ("form", "adopted"), quick_first(product(["accumulated", "never zeroed"], ["two lines", "step by step"]), 3)
)
def test_gradients_accumulated_over_a_save_are_named(
    adopted: str, form: str, run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning says whose they are; with the object that it names, a resume between two steps is bit for bit."""
    whole = trained(tmp_path / "whole", form, adopted)
    assert [text for text in caplog.messages if SAID in text and "Gradients(model)" in text] == caplog.messages
    assert len(caplog.messages) == 1
    caplog.clear()
    with pytest.raises(InterruptedError):
        trained(run_dir, form, adopted, with_gradients=True, stop=10)
    assert torch.equal(trained(run_dir, form, adopted, with_gradients=True), whole)
    assert caplog.messages == []


FORMS = ["in both", "dropped", "zeroed", "frozen", "closure", "by hand", "climbing"]


@pytest.mark.parametrize("form", quick_first(FORMS, 3))
def test_gradients_that_no_step_takes_are_in_nobodys_way(
    form: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps in every batch, gradients that are dropped or zeroed before a step, frozen parameters, a closure.

    Gradients that the program makes by itself, as meta-learning does; weights that it moves to a place where it takes
    their gradients, and back, as SAM does.
    """
    trained(run_dir, form, "step by step")
    assert caplog.messages == []


@pytest.mark.parametrize(("form", "set_to_none"), [*product(["frozen", "passed over"], [True, False])])
def test_a_layer_without_a_gradient_in_a_step_is_quiet(
    form: str, set_to_none: bool, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first layer is frozen in mid-run, or has no part in every other batch, as with routing or random depth."""
    first, last = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
    state = {"first": first, "last": last, "optimizer": optimizer}
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=1, memory_dir=None)) as ckpt:
        for number in range(ckpt.restore(state), 8):
            first.requires_grad_(form != "frozen" or number < 4)
            hidden = ROWS if form == "passed over" and number % 2 else first(ROWS)
            optimizer.zero_grad(set_to_none=set_to_none)
            last(hidden).square().sum().backward()
            optimizer.step()
            ckpt.step(number + 1, state)
    assert caplog.messages == []


def accumulated(run: Path, step: str, *, set_to_none: bool, saves: tuple[int, ...], batches: int = 16) -> None:
    """Take an optimizer's step in every fourth batch, and count each batch as a step."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    late = torch.optim.Adam(net.parameters(), fused=step == "fused")
    take: Any = torch.compile(late.step, backend="aot_eager") if step == "compiled" else late.step
    state = {"net": net, "late": late}
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run), step_interval=100, memory_dir=None)) as ckpt:
        ckpt.restore(state)
        for number in range(1, batches + 1):
            net(ROWS).square().sum().backward()
            if number % 4 == 0:
                take()
                late.zero_grad(set_to_none=set_to_none)
            if number in saves:
                ckpt.save(number, state)
            else:
                ckpt.step(number, state)


@pytest.mark.parametrize(("step", "set_to_none"), quick_first(product(STEPS, [True, False]), 3))
def test_gradients_are_named_in_every_form_of_a_step(
    step: str, set_to_none: bool, run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiled step, and zeros in place of None: saves at the optimizer's steps are quiet, others are told once."""
    accumulated(run_dir, step, set_to_none=set_to_none, saves=(4, 8, 16))
    said = [one.getMessage() for one in caplog.records if one.name == "ckpt_tasks"]  # A compilation logs too.
    assert said == []
    accumulated(tmp_path / "other", step, set_to_none=set_to_none, saves=(2, 3, 6, 7, 16))
    said = [one.getMessage() for one in caplog.records if one.name == "ckpt_tasks"]
    assert [SAID in message for message in said] == [True]


def test_a_last_save_between_two_steps_is_told(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loop that has accumulated over its steps hears of its only save between two, though no step follows it."""
    accumulated(run_dir, "plain", set_to_none=True, saves=(6,), batches=6)
    assert [f"{SAID} 6" in message for message in caplog.messages] == [True]


class Pair:
    """A critic, and a generator whose backward adds to the critic's gradients too."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.nets = nn.Linear(2, 2), nn.Linear(2, 1)
        self.steppers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.nets]
        self.state = {"critic": self.nets[1], "of_critic": self.steppers[1], "other": self.nets[0]}
        self.state |= {"of_other": self.steppers[0]}

    def reset(self, *steppers: torch.optim.Optimizer) -> None:
        for one in steppers:
            one.zero_grad(set_to_none="zeros" not in self.form)

    def batch(self, x: torch.Tensor) -> None:
        generator, critic = self.steppers
        both = self.steppers if "both" in self.form else []
        self.reset(*both or [critic])
        for _ in range(2):
            self.nets[1](self.nets[0](x).detach()).square().sum().backward()
        critic.step()
        self.reset(*both or [generator])
        self.nets[1](self.nets[0](x)).sum().backward()
        generator.step()


@pytest.mark.parametrize("form", quick_first(["each", "both", "each zeros", "both zeros"], 3))
def test_a_pair_of_nets_is_quiet(form: str, run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a generator's backward leaves in its critic, with either way to reset gradients, is nobody's loss."""
    pair = Pair(form)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=1, memory_dir=None)) as ckpt:
        for number in range(ckpt.restore(pair.state), 8):
            pair.batch(ROWS)
            ckpt.step(number + 1, pair.state)
    assert caplog.messages == []
