"""Objects with state_dict and load_state_dict: schedulers, scalers, loaders, the user's own; all of them or none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR
from torchdata import nodes

from ckpt_tasks.errors import StateError, StateMismatchError, UnsupportedStateError
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.kinds.modules import Gradients
from tests.support.roundtrip import Meter, assert_same, everything, fingerprint, restore, save


class Warm:
    """A callable with a state of its own, as LambdaLR saves it."""

    def __init__(self, factor: float):
        self.factor = factor

    def __call__(self, step: int) -> float:
        return self.factor**step


def sequence(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def chain(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 0.9**step, Warm(0.8)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, [lambda _: 0.9, Warm(0.99)]),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 7]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 12, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 4, mode="exp_range", gamma=0.9),
    "CyclicLR own": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 4, scale_fn=lambda x: 0.5**x),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "OneCycleLR linear": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=20, anneal_strategy="linear"),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "SequentialLR": sequence,
    "ChainedScheduler": chain,
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=6),
}


def scheduled(name: str) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}]
    optimizer = SGD(groups, lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}


def rates(state: dict[str, Any], steps: int, first: int) -> list[list[float]]:
    found = []
    for step in range(first, first + steps):
        state["optimizer"].step()
        if isinstance(state["scheduler"], lr_scheduler.ReduceLROnPlateau):
            state["scheduler"].step([1.0, 0.5, 0.7, 0.7, 0.6, 0.8][step % 6])
        else:
            state["scheduler"].step()
        found.append([float(group["lr"]) for group in state["optimizer"].param_groups])
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("stop", [0, 4])
def test_a_scheduler_goes_on(name: str, stop: int) -> None:
    """P14, P15: the next ten learning rates are those without a stop; every scheduler of torch is tried."""
    kinds = {kind.__name__ for kind in lr_scheduler.LRScheduler.__subclasses__() if not kind.__name__.startswith("_")}
    assert kinds <= {*SCHEDULERS}
    state, fresh = scheduled(name), scheduled(name)
    if name in ("LambdaLR", "MultiplicativeLR"):
        fresh["scheduler"].lr_lambdas[1].factor = 0.25  # what a callable object keeps comes back, too
    rates(state, stop, 0)
    saved = save(state)
    expected = rates(state, 10, stop)
    restore(saved, fresh)
    assert rates(fresh, 10, stop) == expected


def test_a_scheduler_with_a_lambda_of_its_own_is_refused_by_path() -> None:
    """P15: a function among a scheduler's attributes is refused, with the attribute's name."""
    state = scheduled("StepLR")
    state["scheduler"].rule = lambda x: x
    with pytest.raises(UnsupportedStateError) as caught:
        capture(state)
    assert caught.value.key == "scheduler/rule"


def scaler(*, enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=enabled)


def scale_steps(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["scaler"].scale(state["model"](torch.ones(1, 2)).sum()).backward()
        state["scaler"].step(state["optimizer"])
        state["scaler"].update()


def scaled() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1), "scaler": scaler()}


@pytest.mark.parametrize("used", [False, True])
def test_a_grad_scaler_goes_on(used: bool) -> None:
    """P16: scale and growth tracker are equal, whether or not the new scaler has made its tensors."""
    state, fresh = scaled(), scaled()
    scale_steps(state, 3)
    if used:
        scale_steps(fresh, 1)
    restore(save(state), fresh)
    for _ in range(3):
        assert state["scaler"].state_dict() == fresh["scaler"].state_dict()
        scale_steps(state, 1)
        scale_steps(fresh, 1)


@pytest.mark.parametrize(
    ("stored", "here", "said"),
    [
        (scaler(), None, "scaler (plain (NoneType) here, stateful in the checkpoint)"),
        (None, scaler(), "scaler (stateful (GradScaler) here, plain in the checkpoint)"),
        (scaler(), scaler(enabled=False), "scaler (a GradScaler that is off here, on in the checkpoint)"),
        (scaler(enabled=False), scaler(), "scaler (a GradScaler that is on here, off in the checkpoint)"),
    ],
)
def test_a_grad_scaler_that_is_absent_or_off_is_an_error(stored: Any, here: Any, said: str) -> None:
    """P16: a scaler that is created later, or switched off, does not lose its state silently."""
    with pytest.raises(StateMismatchError) as caught:
        restore(save({"scaler": stored}), {"scaler": here})
    assert caught.value.different == (said,)


def micro_step(state: dict[str, Any], n: int) -> None:
    (state["model"](torch.full((1, 2), float(n + 1))).square().sum() / 4).backward()
    if n % 4 == 3:
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def accumulating() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model.append(nn.Linear(1, 1))[2].requires_grad_(False)
    return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1, momentum=0.9), "gradients": Gradients(model)}


@pytest.mark.parametrize("stop", [0, 1, 3, 4])
@pytest.mark.parametrize("dirty", [False, True])
def test_an_accumulation_goes_on_in_the_middle(stop: int, dirty: bool) -> None:
    """P19: with Gradients in the state, a stop between micro-steps changes no bit."""
    state, fresh = accumulating(), accumulating()
    for n in range(stop):
        micro_step(state, n)
    saved = save(state)
    if dirty:
        micro_step(fresh, 0)
    held = fresh["model"][0].weight.grad
    restore(saved, fresh)
    now = fresh["model"][0].weight.grad
    assert held is None or now is None or now is held, "a bucket of DDP owns its memory"
    for n in range(stop, 8):
        micro_step(state, n)
        micro_step(fresh, n)
    assert_same(dict(state["model"].state_dict()), dict(fresh["model"].state_dict()))


def test_gradients_that_do_not_fit_are_refused() -> None:
    """P19, P50: another shape or an unknown name is an error, and no gradient was set."""
    one, other = nn.Linear(2, 2), nn.Linear(3, 2)
    one(torch.ones(1, 2)).sum().backward()
    with pytest.raises(StateMismatchError) as caught:
        Gradients(other).load_state_dict({**Gradients(one).state_dict(), "odd": torch.ones(1)})
    assert caught.value.unexpected == ("odd",)
    assert caught.value.different == ("weight ([2, 3] here, [2, 2] in the checkpoint)",)
    assert other.bias.grad is None


@pytest.mark.parametrize("failing", ["first", "second", "third"])
def test_when_one_raises_nothing_has_changed(failing: str) -> None:
    """P50: a load_state_dict that raises half-way puts every group, its own too, and every stream back."""
    saved, target = save(everything(1)), everything(2)
    target[failing].fails = 1
    before = fingerprint(target)
    with pytest.raises(StateError, match="no such state") as caught:
        restore(saved, target)
    assert caught.value.key == failing
    assert isinstance(caught.value.__cause__, ValueError)
    assert "nothing was changed" in str(caught.value)
    assert fingerprint(target) == before
    restore(saved, target)
    assert target["step"] == 1


class Begins:
    """Begins to iterate when it is asked for its state, as the Loader of torchdata.nodes does."""

    def __init__(self) -> None:
        self.next_state: int | None = None
        self.begun: Iterator[int] | None = None
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        self.begun = self.begun or self.items(self.next_state or 0)
        return self.begun

    def items(self, at: int) -> Iterator[int]:
        for self.at in range(at, 6):
            yield self.at

    def state_dict(self) -> dict[str, int]:
        iter(self)
        return {"at": self.at + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_state = state["at"]


@pytest.mark.parametrize("make", [Begins, lambda: nodes.Loader(nodes.IterableWrapper(range(6)))])
def test_an_object_that_begins_when_it_is_asked_goes_on_where_it_was(make: Callable[[], Any]) -> None:
    """A restore asks a loader for its state before it sets it: what the asking has begun is put back."""
    before, after = make(), make()
    assert [*islice(before, 3)] == [0, 1, 2]
    restore(save({"data": before}), {"data": after})
    assert [*after] == [3, 4, 5]


def test_an_object_that_restores_in_place_is_put_back_too() -> None:
    """P50: the copy of the old state does not share memory with the object that is writing over it."""

    class InPlace(Meter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values["t"].copy_(state["t"])
            if self.fails:
                self.fails -= 1
                raise ValueError("too late")

    target = InPlace(t=torch.zeros(2))
    target.fails = 1
    with pytest.raises(StateError, match="too late"):
        restore(save({"it": Meter(t=torch.ones(2))}), {"it": target})
    assert target.values["t"].tolist() == [0.0, 0.0]


def test_an_interrupt_puts_everything_back_too() -> None:
    """P69: Ctrl-C inside of a load_state_dict leaves the old state and goes on as Ctrl-C."""

    class Interrupted(Meter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            if state["n"] == 1:
                raise KeyboardInterrupt

    target = everything(2)
    target["second"] = Interrupted(n=2)
    saved = save(everything(1))
    before = fingerprint(target)
    with pytest.raises(KeyboardInterrupt):
        restore(saved, target)
    assert fingerprint(target) == before


def test_an_object_that_refuses_its_old_state_is_named() -> None:
    """P50: when putting back fails too, the error says which object is in doubt, and the others are put back."""
    saved, target = save(everything(1)), everything(2)
    target["second"].fails = 2
    with pytest.raises(StateError, match="except: second did not take its old state back"):
        restore(saved, target)
    assert target["first"].values["n"] == 2
    assert target["step"] == 2


def test_a_whole_state_comes_back_in_any_order() -> None:
    """P3, P20, P73: every kind of group at once, in another order, and the random streams of the process with them."""
    state, target = everything(1), everything(2)
    saved, before = save(state), fingerprint(state)
    torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    backwards = {name: target[name] for name in reversed(target)}
    restore(saved, backwards)
    assert fingerprint({name: backwards[name] for name in target}) == before
