"""Gradients that are accumulated over a save are named, where a step takes them; gradients left behind are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_tasks import CheckpointConfig, Checkpointer, Gradients, resumable

ROWS = torch.arange(24.0).view(12, 2) / 24
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
        if self.form in ("accumulated", "in both"):
            if is_fourth or self.form == "in both":
                late.step()
                late.zero_grad()
        elif self.form == "frozen":
            if number == 1:
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


def trained(run: Path, form: str, adopted: str, *, with_gradients: bool = False, stop: int = 0) -> torch.Tensor:
    """Train 24 batches, or fail behind the save of step `stop`; return the second module's weights."""
    training = Training(form, with_gradients=with_gradients)
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


@pytest.mark.parametrize("adopted", ["two lines", "step by step"])
def test_gradients_accumulated_over_a_save_are_named(
    adopted: str, run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning says whose they are; with the object that it names, a resume between two steps is bit for bit."""
    whole = trained(tmp_path / "whole", "accumulated", adopted)
    assert [text for text in caplog.messages if SAID in text and "Gradients(model)" in text] == caplog.messages
    assert len(caplog.messages) == 1
    caplog.clear()
    with pytest.raises(InterruptedError):
        trained(run_dir, "accumulated", adopted, with_gradients=True, stop=10)
    assert torch.equal(trained(run_dir, "accumulated", adopted, with_gradients=True), whole)
    assert caplog.messages == []


@pytest.mark.parametrize("form", ["in both", "dropped", "zeroed", "frozen", "closure"])
def test_gradients_that_no_step_takes_are_in_nobodys_way(
    form: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps in every batch, gradients that are dropped or zeroed before a step, frozen parameters, and a closure."""
    trained(run_dir, form, "step by step")
    assert caplog.messages == []
