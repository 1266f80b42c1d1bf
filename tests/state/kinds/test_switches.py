"""What training switches stays so after a resume: gradients of parameters, and modes of modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, Location
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.state.kinds.optimizers import OptimizerPart, capture_optimizer
from ckpt_tasks.state.tensors.copies import Copies
from ckpt_tasks.state.tensors.tensors import TensorSet
from ckpt_tasks.testing import MemoryStore, located
from tests.support.roundtrip import assert_same
from tests.support.sweeps import quick_first


def trained(run: Location, until: int, *, frozen: bool, switch: int) -> dict[str, Any]:
    """Train from where the run is; at one step the loop freezes what the program begins with, or unfreezes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(not frozen)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with Checkpointer(CheckpointConfig(checkpoint_dir=run, max_num_checkpoints=None, memory_dir=None)) as ckpt:
        for step in range(ckpt.restore(state) + 1, until + 1):
            if step == switch:
                model[0].requires_grad_(frozen)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.save(step, state)
        taken = [(ckpt.restore(state, step=back), model[0].weight.requires_grad) for back in (3, until)]
    assert taken == [(3, not frozen), (until, frozen if switch <= until else not frozen)]
    return state


@pytest.mark.parametrize("frozen", quick_first([True, False]))
def test_what_training_unfreezes_or_freezes_stays_so(frozen: bool) -> None:
    """Through two resumes, and back to a step before it, as in a training without a break; nothing else is kept."""
    whole, resumed, still = (located(MemoryStore()) for _ in range(3))
    expected = trained(whole, 9, frozen=frozen, switch=4)
    states = [trained(resumed, until, frozen=frozen, switch=4) for until in (3, 5, 9)]
    for name in ("model", "optimizer"):
        assert_same(states[-1][name].state_dict(), expected[name].state_dict())
    trained(still, 3, frozen=frozen, switch=99)
    trained(still, 5, frozen=not frozen, switch=99)  # edited: what the program begins with is its own


def trained_in_modes(run: Location, until: int, *, switch: int = 4, how: str = "") -> dict[str, Any]:
    """Train from where the run is; at one step the loop puts a part into another mode; `how` says what else it does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    model[2].eval()
    if "begins in eval" in how:
        model.eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"nets": [model], "optimizer": optimizer}
    with Checkpointer(CheckpointConfig(checkpoint_dir=run, max_num_checkpoints=None, memory_dir=None)) as ckpt:
        if "train() first" in how:
            model.train()
        begun = ckpt.restore(state)
        for step in range(begun + 1, until + 1):
            if "by the step" in how:
                model.train()
                model[1].train(step < switch)
                model[2].train(step >= switch)
            elif step == switch:
                model[1].eval()
                model[2].train()
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if "evaluates" in how:
                modes = [one.training for one in model.modules()]
                model.eval()
                if "saves in it" in how:
                    ckpt.save(step, state)
                for one, mode in zip(model.modules(), modes, strict=True):
                    one.training = mode
            if "saves in it" not in how or step % 2:
                ckpt.save(step, state)
    return {**state, "modes": [one.training for one in model.modules()]}


@pytest.mark.parametrize("how", quick_first(["evaluates, train() first", "", "by the step, begins in eval"]))
def test_what_training_puts_into_another_mode_stays_so(caplog: pytest.LogCaptureFixture, how: str) -> None:
    """Through resumes, as without a break, and nothing is said; an evaluation in which a save falls is no mode."""
    expected, run = trained_in_modes(located(MemoryStore()), 9, how=how), located(MemoryStore())
    resumed = [trained_in_modes(run, until, how=how) for until in (3, 5, 9)]
    for name in ("nets", "optimizer"):
        kept, whole = resumed[-1][name], expected[name]
        pairs = zip(kept, whole, strict=True) if name == "nets" else [(kept, whole)]
        for one, other in pairs:
            assert_same(one.state_dict(), other.state_dict())
    assert resumed[-1]["modes"] == expected["modes"]
    assert not caplog.records


def test_a_whole_module_in_eval_says_nothing_of_training(caplog: pytest.LogCaptureFixture) -> None:
    """A save in an evaluation is restored in the modes with which the program begins; nothing is said."""
    run = located(MemoryStore())
    trained_in_modes(run, 2, switch=99, how="evaluates, saves in it")
    state = trained_in_modes(run, 4, switch=99, how="evaluates, saves in it")
    assert state["modes"] == [True, True, True, False, True]
    assert not caplog.records


@pytest.mark.parametrize(
    "modes", [1, {"net": 1}, {"net": {}}, {"net": {"": True, "0": "yes"}}, {"net": {"": True, 1: 2}}]
)
def test_modes_that_are_none_are_refused(modes: Any) -> None:
    """A tree of others with wrong modes is damaged; nothing is set."""
    net = nn.Linear(1, 1)
    tree = capture_optimizer(torch.optim.SGD(net.parameters()), "one", {}, TensorSet(None))
    with pytest.raises(IntegrityError, match="malformed"):
        OptimizerPart(torch.optim.SGD(net.parameters()), "one", tree | {"modes": modes}, {}, Copies())


def by_hand(run: Location, until: int, rate: float, *, sets: bool = True) -> list[float]:
    """Train from where the run is; the loop sets the learning rate of each step itself, as nanoGPT does."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    state: dict[str, Any] = {"net": net, "optimizer": optimizer}
    with Checkpointer(CheckpointConfig(checkpoint_dir=run, memory_dir=None)) as ckpt:
        for step in range(ckpt.restore(state) + 1, until + 1):
            if sets:
                optimizer.param_groups[0]["lr"] = 0.1 / step
            ckpt.save(step, state)
    return [group["lr"] for group in optimizer.param_groups]


def test_a_rate_that_the_loop_sets_is_no_other_setting(caplog: pytest.LogCaptureFixture) -> None:
    """A resume of the same program is quiet; one that is made with another rate is told, and what is restored."""
    run = located(MemoryStore())
    rates = [by_hand(run, until, 0.1, sets=until < 6) for until in (2, 4, 6)]
    assert rates == [[0.1 / 2], [0.1 / 4], [0.1 / 4]]
    assert by_hand(run, 7, 0.1 / 4, sets=False) == [0.1 / 4]  # the restored rate itself
    assert not caplog.records
    assert by_hand(run, 8, 0.3, sets=False) == [0.1 / 4]
    assert "optimizer lr: 0.025 → 0.3. 0.025 is restored." in caplog.text
