"""Right programs of two phases, and optimizers with modes, hear of no object that their state leaves out."""

from __future__ import annotations

from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader, resumable
from tests.support.interpreters import python
from tests.support.sweeps import quick_first

DATA = TensorDataset(torch.arange(16.0).view(8, 2) / 16)
ENDED = "Nothing was left to train"


class Program:
    """Trains a head, then the whole net; it fails in a step of the program if it is told to."""

    def __init__(self, run: Path, adopted: str, fail_at: int = 0):
        torch.manual_seed(0)
        self.run, self.adopted, self.fail_at, self.steps = run, adopted, fail_at, 0
        self.body = nn.Linear(2, 2)
        self.net = nn.Sequential(self.body, nn.Linear(2, 1))
        self.net[0].requires_grad_(False)

    def step(self, x: torch.Tensor, *optimizers: torch.optim.Optimizer) -> None:
        self.steps += 1
        if self.steps == self.fail_at:
            raise InterruptedError
        self.net.zero_grad()
        self.net(x).square().sum().backward()
        for one in optimizers:
            one.step()

    def config(self, name: str) -> CheckpointConfig:
        return CheckpointConfig(checkpoint_dir=str(self.run / name), step_interval=4, memory_dir=None)

    def phase(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Train two epochs in a directory of the phase."""
        if self.adopted == "two lines":
            loader, epochs = resumable(
                self.config(name), DataLoader(DATA, batch_size=2), 2, net=self.net, optimizer=optimizer
            )
            for _ in epochs:
                for (x,) in loader:
                    self.step(x, optimizer)
            return
        data = ResumableLoader(DATA, 2, shuffle=True, seed=0)
        state = {"net": self.net, "optimizer": optimizer, "data": data}
        with Checkpointer(self.config(name)) as ckpt:
            done = ckpt.restore(state)
            for _ in data.epochs(2):
                for number, (x,) in enumerate(data, done + 1):
                    self.step(x, optimizer)
                    ckpt.step(number, state)
                    done = number

    def in_two_directories(self, *, early: bool) -> torch.Tensor:
        head = torch.optim.SGD(self.net[1].parameters(), lr=0.1, momentum=0.9)
        other = torch.optim.Adam(self.net[0].parameters()) if early else None
        self.phase("head", head)
        self.net[0].requires_grad_(True)
        self.phase("body", other or torch.optim.Adam(self.net[0].parameters()))
        return self.body.weight.detach()

    def in_one_directory(self) -> torch.Tensor:
        data = ResumableLoader(DATA, 2, shuffle=True, seed=0)
        head, body = (torch.optim.Adam(self.net[n].parameters()) for n in (1, 0))
        state = {"net": self.net, "head": head, "body": body, "data": data}
        with Checkpointer(self.config("run")) as ckpt:
            done = ckpt.restore(state)
            for epoch in data.epochs(4):
                self.net[0].requires_grad_(epoch >= 2)
                for number, (x,) in enumerate(data, done + 1):
                    self.step(x, head, body)
                    ckpt.step(number, state)
                    done = number
        return self.body.weight.detach()

    def train(self, form: str) -> torch.Tensor:
        return self.in_one_directory() if form == "one" else self.in_two_directories(early=form == "two, made early")


@pytest.mark.parametrize(
    ("adopted", "form"),
    quick_first([("step by step", "one"), *product(["two lines", "step by step"], ["two", "two, made early"])], 3),
)
def test_a_program_of_two_phases_is_quiet(
    adopted: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a stop, and failed in either phase, it ends bit for bit, and no optimizer of the other phase is missed.

    Started again in its second phase by the same process, it hears that the first one has nothing left to train.
    """
    whole = Program(tmp_path / "whole", adopted).train(form)
    assert caplog.messages == []
    for fail_at in (6, 14):
        with pytest.raises(InterruptedError):
            Program(tmp_path / str(fail_at), adopted, fail_at).train(form)
        assert torch.equal(Program(tmp_path / str(fail_at), adopted).train(form), whole)
    said = [message for message in caplog.messages if "its epochs were over" not in message]  # Of the failure.
    assert [message.startswith(ENDED) for message in said] == [True] * (form != "one")


@pytest.mark.slow
@pytest.mark.parametrize("adopted", ["two lines", "step by step"])
def test_an_earlier_phase_is_not_told_that_it_has_ended(adopted: str, tmp_path: Path) -> None:
    """Started again in its second phase, a program is quiet; started once more, it hears of both ended runs."""
    program = f"""from pathlib import Path; import sys
from tests.state.test_phases import Program
Program(Path({str(tmp_path)!r}), {adopted!r}, int(sys.argv[1])).train("two")"""
    said = [python("-c", program, fail_at).stderr for fail_at in (14, 0, 0)]
    assert "InterruptedError" in said[0]
    assert [text.count(ENDED) for text in said] == [0, 0, 2]


def test_an_optimizer_that_begins_to_step_later_is_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One outside the state that steps in every fifth step alone is named, at the first save behind its step."""
    program = Program(tmp_path, "step by step")
    head, rare = (torch.optim.Adam(program.net[n].parameters()) for n in (1, 0))
    program.net[0].requires_grad_(True)
    state, said = {"net": program.net, "head": head}, []
    with Checkpointer(program.config("run")) as ckpt:
        ckpt.restore(state)
        for number, (x,) in enumerate(chain(DataLoader(DATA), DataLoader(DATA)), 1):
            program.step(x, head, *([rare] if number % 5 == 0 else []))
            ckpt.step(number, state)
            said.append(len(caplog.messages))
    assert said == [0] * 7 + [1] * 9
    assert "The Adam of net is not in the state" in caplog.messages[0]


class Averaging(torch.optim.Optimizer):
    """Trains other weights than it evaluates, as schedulefree does; it counts in its param groups."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr, "train_mode": False, "k": 0})

    def _swap(self, *, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not to_train:
                group["train_mode"] = to_train
                for p in group["params"]:
                    if "mean" in self.state[p]:
                        mean = self.state[p]["mean"].clone()
                        self.state[p]["mean"].copy_(p.data)
                        p.data.copy_(mean)

    def train(self) -> None:
        self._swap(to_train=True)

    def eval(self) -> None:
        self._swap(to_train=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)
                self.state[p].setdefault("mean", p.clone()).lerp_(p, 1 / group["k"])


def averaged(run: Path, until: int) -> torch.Tensor:
    """Train from where the run is, with an evaluation after every second step; return the weights to evaluate."""
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    optimizer = Averaging(net.parameters(), 0.1)
    state = {"net": net, "optimizer": optimizer}
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run), step_interval=1, memory_dir=None)) as ckpt:
        for number in range(ckpt.restore(state) + 1, until + 1):
            optimizer.train()
            net.zero_grad()
            net(DATA.tensors[0]).square().sum().backward()
            optimizer.step()
            if number % 2 == 0:
                optimizer.eval()
            ckpt.step(number, state)
    optimizer.eval()
    return net.weight.detach()


def test_an_optimizer_with_modes_of_its_own_is_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Saved in either mode and resumed, it ends bit for bit; what it counts and switches itself is no setting."""
    for until in (1, 4, 5):
        averaged(tmp_path / "resumed", until)
    assert torch.equal(averaged(tmp_path / "resumed", 8), averaged(tmp_path / "whole", 8))
    assert caplog.messages == []
