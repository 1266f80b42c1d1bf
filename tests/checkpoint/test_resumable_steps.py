"""What `resumable` counts as a step and keeps in its state: batches without a step, and values that no save follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt_tasks import resumable
from ckpt_tasks.checkpoint.counting import Steps
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.system import System
from tests.support.interpreters import python
from tests.support.systems import running_on


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


FAILING = """
import sys, torch
from ckpt_tasks import resumable
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
data = torch.utils.data.DataLoader(range(12))
loader, epochs = resumable(sys.argv[1], data, 2, model=model, optimizer=optimizer)
for _ in epochs:
    for number, _ in enumerate(loader, loader.batch):
        if number == 3:
            raise InterruptedError
"""


def test_a_loop_that_fails_before_its_step_is_right(run_dir: Path) -> None:
    """A loop that accumulates, and fails before its first step, hears nothing of the batches without a step."""
    said = python("-c", FAILING, run_dir).stderr
    assert "InterruptedError" in said
    assert "no optimizer of the state has stepped" not in said


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


@pytest.mark.parametrize(("begun_at", "stepping", "told"), [(0, 0, True), (4, 0, False), (4, 2, True)])
def test_a_resumed_run_that_stops_stepping_is_told(
    begun_at: int, stepping: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A rest of a resumed epoch may be too small for a step; but where it has stepped, eight batches are not."""
    steps = Steps(begun_at, counts_batches=False)
    for batch in range(stepping + 8):
        steps.handed_out()
        if batch < stepping:
            steps.note()
        steps.end()
    steps.end_run()
    assert ("batches since its last step" in caplog.text) == told
