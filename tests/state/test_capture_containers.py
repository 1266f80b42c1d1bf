"""Lists, dicts and dataclasses of modules, optimizers and other objects: one group for each object."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import StateMismatchError, UnsupportedStateError
from ckpt_tasks.flows.session.hyperparameters import settings_of
from ckpt_tasks.flows.session.local_session import StateSession
from ckpt_tasks.state.capture import capture
from tests.support.roundtrip import assert_same, restore, same_module, save


@dataclass
class Progress:
    """What a program counts."""

    epoch: int = 0
    best: float | None = None
    history: list[float] = field(default_factory=list)
    average: torch.Tensor = field(default_factory=lambda: torch.zeros(2))


@dataclass
class Player:
    """One of two nets that train each other."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class Frozen:
    """A record whose fields cannot be assigned."""

    seen: Any


def gan(steps: int) -> dict[str, Any]:
    players, schedules = [], []
    for width in (3, 4, 5):
        net, progress = nn.Linear(2, width), Progress()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * width)
        schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        for step in range(steps):
            net(torch.randn(3, 2)).square().sum().backward()
            optimizer.step()
            schedules[-1].step()
            progress.epoch, progress.best = step + 1, step / 2
            progress.history.append(step)
            progress.average += 1
        players.append(Player(net, optimizer, progress))
    one, other, third = players
    return {
        "nets": [one.net, other.net],
        "optimizers": (one.optimizer, other.optimizer),
        "schedules": {"one": schedules[0], "other": schedules[1], "at": steps, "seen": [steps]},
        "third": third,
        "records": [one.progress],
    }


def test_containers_of_objects_come_back() -> None:
    """P20: lists of modules, tuples of optimizers, dicts, dataclasses: each object is a group, restored in place."""
    state, fresh = gan(2), gan(0)
    held = [*fresh["nets"], fresh["third"], fresh["third"].progress, fresh["records"][0].history]
    saved = save(state)
    assert saved.groups["optimizers_1"].tree["param_groups"][0]["params"] == ["nets_1/weight", "nets_1/bias"]
    restore(saved, fresh)
    assert save(fresh).manifest == saved.manifest
    assert_same(save(fresh).tensors, saved.tensors)
    assert (fresh["schedules"]["at"], fresh["schedules"]["seen"]) == (2, [2])
    assert_same(vars(fresh["third"].progress), vars(state["third"].progress))
    now = [*fresh["nets"], fresh["third"], fresh["third"].progress, fresh["records"][0].history]
    assert all(one is other for one, other in zip(held, now, strict=True))


def test_other_numbers_and_orders_of_objects_are_errors() -> None:
    """P50: one optimizer too few or too many, or two exchanged, and nothing is changed."""
    state = gan(2)
    saved = save(state)
    for change, said in (
        (lambda fresh: fresh["nets"].pop(), "only in the checkpoint: nets_1"),
        (lambda fresh: fresh["nets"].append(nn.Linear(1, 1)), "not in the checkpoint: nets_2"),
        (lambda fresh: fresh["nets"].reverse(), "nets_0/weight"),
    ):
        fresh = gan(0)
        change(fresh)  # type: ignore[no-untyped-call]
        before = fresh["third"].net.weight.clone()
        with pytest.raises(StateMismatchError, match=said):
            restore(saved, fresh)
        assert torch.equal(fresh["third"].net.weight, before)
        assert fresh["third"].progress.epoch == 0


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": [nn.ReLU()], "a_0": 1}, "two parts of the state have this name"),
        ({"a": {"with.dot": nn.ReLU()}}, "cannot be the name"),
        ({"a": (nn.ReLU(), 3)}, "in a tuple or frozen"),
        ({"a": Frozen(3)}, "in a tuple or frozen"),
        ({"a": Frozen(lambda: 3)}, "in a tuple or frozen"),
        ({"a": Progress(best=lambda: 3)}, "cannot be stored"),  # type: ignore[arg-type]
    ],
)
def test_what_could_not_be_restored_is_refused_at_the_save(state: dict[str, Any], said: str) -> None:
    """P7: two values of one name, names that no group can have, numbers where nothing can be assigned."""
    with pytest.raises(UnsupportedStateError, match=said):
        capture(state)


def test_what_is_frozen_is_restored_in_place() -> None:
    """P20: a list and a tensor in a frozen dataclass, or beside a module in a tuple, take their values."""
    fresh: dict[str, Any] = {"a": Frozen([]), "b": (nn.Linear(1, 1), np.zeros(2), {})}
    state: dict[str, Any] = {"a": Frozen([1, 2]), "b": (nn.Linear(1, 1), np.ones(2), {"k": 1})}
    restore(save(state), fresh)
    assert fresh["a"].seen == [1, 2]
    assert fresh["b"][1].tolist() == [1.0, 1.0]
    assert fresh["b"][2] == {"k": 1}
    same_module(fresh["b"][0], state["b"][0])


def test_a_run_and_its_tools_take_containers(run_dir: Path) -> None:
    """P20: on storage, in a partial restore, in a fork's settings and after a failed attempt as well."""
    state, fresh = gan(2), gan(0)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        ckpt.save(2, state)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        assert ckpt.restore(fresh) == 2
        session = StateSession(ckpt, fresh)
        fresh["third"].net(torch.ones(1, 2)).sum().backward()
        session.discard()
        assert fresh["third"].net.weight.grad is None
    same_module(fresh["nets"][1], state["nets"][1])
    part = {"nets": [nn.Linear(2, 3), nn.Linear(2, 4)]}
    run = open_run(str(run_dir))
    run.restore(run.find("latest"), part, partial=True)
    same_module(part["nets"][1], state["nets"][1])
    assert {*settings_of(state).groups} == {"optimizers_0", "optimizers_1", "third_optimizer"}
    assert {*settings_of(state).schedules} == {"schedules_one", "schedules_other"}


class Accuracy(nn.Module):
    """A metric as torchmetrics has them: its counts are attributes, and in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.correct = torch.zeros(())
        self.seen: list[torch.Tensor] = []


class Empty:
    """An object that forgets what it counts."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@dataclass
class Unhashed(Empty):
    """One that has no hash."""


@pytest.mark.parametrize("make", [Accuracy, Empty, lambda: [Unhashed(), nn.Linear(1, 1)]])
def test_what_saves_nothing_is_warned_of(run_dir: Path, caplog: pytest.LogCaptureFixture, make: Any) -> None:
    """P20: a metric whose state_dict() is empty is not saved as nothing without a word; the warning comes once."""
    quiet = {
        "loss": nn.MSELoss(),
        "act": nn.Sequential(nn.ReLU()),
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
    }
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        ckpt.save(1, quiet)
        assert not [one for one in caplog.records if "Nothing of" in one.getMessage()]
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir / "other"))) as ckpt:
        metric = make()
        ckpt.save(1, {"metric": metric})
        ckpt.save(2, {"metric": metric})
    said = [one.getMessage() for one in caplog.records if "Nothing of" in one.getMessage()]
    assert len(said) == 1
    assert "metric" in said[0]
    assert "state_dict() of this" in said[0]


class Batch:
    """A variable of a training loop that would be large."""


def test_a_save_keeps_no_variable_of_the_loop(run_dir: Path) -> None:
    """P11: what the loop lets go of after a save is free at once, though the save looked for its DataLoaders."""
    loader = DataLoader(range(4), shuffle=True)  # type: ignore[arg-type, var-annotated]
    batch = Batch()
    alive = weakref.ref(batch)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=1)) as ckpt:
        ckpt.save(1, {"weight": torch.ones(2)})
        ckpt.step(2, {"weight": torch.ones(2)})
        del batch
        assert alive() is None
    assert len(loader) == 4  # the loop has it in a variable
