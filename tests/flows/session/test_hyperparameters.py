"""Changed parameters in a restored state: what two fresh programs differ in, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from ckpt_tasks.errors import StateMismatchError
from ckpt_tasks.flows.session.hyperparameters import Settings, apply_settings, changed_settings, settings_of

State = dict[str, Any]
rates = st.floats(1e-6, 10.0)


def made(kind: str = "none", *, lr: float = 0.1, decay: float = 0.0, length: int = 10) -> State:
    """Return a fresh state; `length` is of the schedule."""
    model = nn.Linear(3, 2)
    optimizer: Optimizer = torch.optim.AdamW(
        [{"params": [model.weight], "weight_decay": decay}, {"params": [model.bias], "lr": lr / 2}], lr=lr
    )
    state: State = {"model": model, "optimizer": optimizer, "seen": {"count": length}}
    schedules: dict[str, Any] = {
        "none": lambda: None,
        "warmup": lambda: LambdaLR(optimizer, lambda step: min(1.0, step / length)),
        "step": lambda: StepLR(optimizer, step_size=length, gamma=0.5),
        "milestones": lambda: MultiStepLR(optimizer, [length, 2 * length]),
        "cosine": lambda: CosineAnnealingLR(optimizer, T_max=4 * length),
        "one cycle": lambda: OneCycleLR(optimizer, max_lr=[lr, lr / 2], total_steps=8 * length),
        "plateau": lambda: ReduceLROnPlateau(optimizer, patience=0, factor=0.5, eps=0.0),
        "sequence": lambda: SequentialLR(
            optimizer, [LinearLR(optimizer, 0.1, 1.0, length), CosineAnnealingLR(optimizer, 4 * length)], [length]
        ),
    }
    schedule = schedules[kind]()
    return state if schedule is None else {**state, "schedule": schedule}


def train(state: State, steps: int) -> None:
    for _ in range(steps):
        loss = state["model"](torch.ones(3)).square().sum()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        if isinstance(state.get("schedule"), ReduceLROnPlateau):
            state["schedule"].step(1.0)
        elif "schedule" in state:
            state["schedule"].step()


def restored(kind: str, steps: int, **old: Any) -> tuple[State, Settings, State]:
    """Train a state, and return what it was, its settings, and a fresh one of the same to compare with."""
    state = made(kind, **old)
    train(state, steps)
    return state, settings_of(state), made(kind, **old)


def change(kind: str, steps: int, old: dict[str, Any], new: dict[str, Any]) -> State:
    """Restore what was trained with the old parameters into a program of the new ones, and apply what changed."""
    trained, _, fresh_old = restored(kind, steps, **old)
    live = made(kind, **new)
    fresh_new = settings_of(live)
    live["model"].load_state_dict(trained["model"].state_dict())
    live["optimizer"].load_state_dict(copy.deepcopy(trained["optimizer"].state_dict()))
    if "schedule" in live:
        live["schedule"].load_state_dict(copy.deepcopy(trained["schedule"].state_dict()))
    apply_settings(live, changed_settings(settings_of(live), settings_of(fresh_old), fresh_new))
    return live


def lrs(state: State) -> list[float]:
    return [group["lr"] for group in state["optimizer"].param_groups]


KINDS = ["none", "warmup", "step", "milestones", "cosine", "one cycle", "plateau", "sequence"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 7, 23])
def test_the_rate_goes_on_as_if_it_had_always_been_the_new_one(kind: str, steps: int) -> None:
    """P14, P15: under every schedule, wherever it stands, the rates now and later are those of the new base."""
    old: dict[str, Any] = {"lr": 0.1, "length": 5}
    new: dict[str, Any] = {"lr": 0.004, "length": 5}
    state = change(kind, steps, old, new)
    expected = made(kind, **new)
    train(expected, steps)
    for _ in range(3):
        assert lrs(state) == pytest.approx(lrs(expected), rel=1e-9)
        if "schedule" in state and kind != "plateau":
            assert state["schedule"].get_last_lr() == pytest.approx(expected["schedule"].get_last_lr(), rel=1e-9)
        train(state, 4)
        train(expected, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changed_changes_nothing(kind: str) -> None:
    """The same parameters on both sides leave every setting as it was restored, the objects in it included."""
    state, before, fresh = restored(kind, 9)
    held = [group["betas"] for group in state["optimizer"].param_groups]
    assert changed_settings(before, settings_of(fresh), settings_of(fresh)) == before
    apply_settings(state, before)
    assert settings_of(state) == before
    assert all(group["betas"] is one for group, one in zip(state["optimizer"].param_groups, held, strict=True))


def test_what_else_changed_is_new_and_the_rest_stays() -> None:
    """P15: the decay of its group, lengths, milestones and schedules within; how far each has come stays."""
    state = change("none", 5, {"decay": 0.01}, {"decay": 0.5})
    assert [group["weight_decay"] for group in state["optimizer"].param_groups] == [0.5, 0.01]
    assert [float(one["step"]) for one in state["optimizer"].state.values()] == [5.0, 5.0]
    for kind, key, value in (("step", "step_size", 3), ("cosine", "T_max", 12), ("milestones", "milestones", {3, 6})):
        found = change(kind, 7, {"length": 10}, {"length": 3})["schedule"].state_dict()
        assert found["last_epoch"] == 7
        assert (found[key] if isinstance(value, int) else {*found[key]}) == value
    inner = change("sequence", 4, {"length": 10}, {"length": 6})["schedule"].state_dict()["_schedulers"]
    assert (inner[0]["total_iters"], inner[1]["T_max"], inner[0]["last_epoch"]) == (6, 24, 4)
    state, expected = change("sequence", 4, {"lr": 0.1}, {"lr": 0.01}), made("sequence", lr=0.01)
    train(expected, 4)
    lasts = [one["schedule"].state_dict()["_schedulers"][0]["_last_lr"] for one in (state, expected)]
    assert lasts[0] == pytest.approx(lasts[1])


def test_a_rate_in_a_tensor_stays_that_tensor() -> None:
    """What a captured graph reads is filled and not replaced."""
    model = nn.Linear(2, 1)

    def fresh(lr: float) -> State:
        return {"optimizer": torch.optim.Adam(model.parameters(), lr=torch.tensor(lr), capturable=False, foreach=False)}

    state, new = fresh(0.5), fresh(0.25)
    held = state["optimizer"].param_groups[0]["lr"]
    apply_settings(state, changed_settings(settings_of(state), settings_of(fresh(0.5)), settings_of(new)))
    assert state["optimizer"].param_groups[0]["lr"] is held
    assert held == 0.25


def settings(group: dict[str, Any]) -> Settings:
    return Settings({"optimizer": [group]}, {})


def test_what_has_other_parts_is_refused() -> None:
    """Parameters that make another optimizer, schedule or group cannot be brought into a state."""
    plain, scheduled = settings_of(made("none")), settings_of(made("step"))
    fewer = Settings({name: groups[:1] for name, groups in plain.groups.items()}, {})
    for old, new in ((plain, scheduled), (plain, fewer), (fewer, plain)):
        with pytest.raises(StateMismatchError, match="other optimizers"):
            changed_settings(plain, old, new)
