"""What a capture remembers of modules and optimizers: the next capture is the one that a walk would give."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks.checkpoint.save.parts import encode_groups
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.structure import Structure

State = dict[str, Any]
OWN = torch.ones(1)
MADE_ANEW = ("net/waves",)  # Its conjugate is copied.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
        self.waves = nn.Parameter(torch.full((2, 2), 1 + 2j))
        self.register_buffer("mask", torch.ones(4))


class WithExtra(nn.Linear):
    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None:
        pass


def made() -> State:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"seen": 3, "optimizer": optimizer, "net": net, "schedule": schedule, "teacher": nn.Linear(4, 4)}


def entry(state: State) -> dict[str, Any]:
    found: dict[str, Any] = state["optimizer"].state[state["net"].first.weight]
    return found


def first_set(state: State, name: str, value: Any) -> None:
    setattr(state["net"].first, name, value)


def renamed(state: State) -> None:
    net = state["net"]
    net.other = vars(net)["_modules"].pop("first")


def moved(state: State) -> None:
    last = state["net"].last
    last[1].weight = vars(last[2])["_parameters"].pop("weight")


def with_more(state: State) -> None:
    read = state["optimizer"].state_dict
    state["optimizer"].state_dict = lambda: {**read(), "more": 5}


CHANGES: dict[str, Callable[[State], Any]] = {
    "memory": lambda s: first_set(s, "weight", nn.Parameter(s["net"].first.weight.detach().clone())),
    "data": lambda s: setattr(s["net"].first.weight, "data", torch.zeros(4, 4)),
    "transposed": lambda s: setattr(s["net"].first.weight, "data", s["net"].first.weight.data.t()),
    "shape": lambda s: setattr(s["net"].first.weight, "data", s["net"].first.weight.data.view(2, 8)),
    "conjugated": lambda s: setattr(s["net"].waves, "data", s["net"].waves.data.conj()),
    "frozen": lambda s: s["net"].first.weight.requires_grad_(False),
    "tied": lambda s: first_set(s, "weight", s["net"].last[0].weight),
    "no bias": lambda s: first_set(s, "bias", None),
    "renamed module": renamed,
    "moved parameter": moved,
    "moved within a module": lambda s: vars(s["net"].last[2])["_parameters"].update(
        bias=s["net"].last[2].weight, weight=None
    ),
    "parameter among the buffers": lambda s: vars(s["net"].first)["_buffers"].update(
        bias=vars(s["net"].first)["_parameters"].pop("bias")
    ),
    "new module": lambda s: s["net"].add_module("more", nn.Linear(2, 2)),
    "new parameter": lambda s: first_set(s, "scale", nn.Parameter(torch.ones(1))),
    "new buffer": lambda s: s["net"].register_buffer("seen", torch.zeros(1)),
    "buffer that is not saved": lambda s: s["net"]._non_persistent_buffers_set.add("mask"),
    "hook": lambda s: s["net"].register_state_dict_post_hook(lambda m, d, *_: d.update({"hooked": OWN})),
    "extra state": lambda s: setattr(s["net"], "first", WithExtra(4, 4)),
    "own state_dict": lambda s: setattr(s["net"], "state_dict", lambda **_: {"one": OWN}),
    "mode": lambda s: s["net"].norm.eval(),
    "rate": lambda s: s["optimizer"].param_groups[0].update(lr=0.01),
    "rate that is a tensor": lambda s: s["optimizer"].param_groups[0].update(lr=torch.tensor(0.01)),
    "param group": lambda s: s["optimizer"].add_param_group({"params": s["teacher"].parameters()}),
    "foreign parameter": lambda s: s["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "order of parameters": lambda s: s["optimizer"].param_groups[0]["params"].reverse(),
    "no moments": lambda s: s["optimizer"].state.clear(),
    "fewer moments": lambda s: s["optimizer"].state.pop(s["net"].first.weight),
    "another moment": lambda s: entry(s).update(max_exp_avg_sq=torch.zeros(4, 4)),
    "renamed moment": lambda s: entry(s).update(another=entry(s).pop("exp_avg_sq")),
    "own state_dict of an optimizer": with_more,
    "a number among the moments": lambda s: entry(s).update(count=5),
    "moments elsewhere": lambda s: entry(s).update(exp_avg=torch.ones(4, 4)),
    "moments that share memory": lambda s: entry(s).update(exp_avg=entry(s)["exp_avg_sq"]),
    "renamed group": lambda s: s.update(model=s.pop("net")),
    "fewer groups": lambda s: s.pop("teacher"),
    "more plain values": lambda s: s.update(more=torch.ones(2)),
}


def found(state: State, structure: Structure | None) -> Any:
    captured = capture(state, structure=structure)
    tensors = [
        (
            key,
            one.shape,
            one.stride(),
            one.requires_grad,
            one.is_conj(),
            one.tolist() if key in MADE_ANEW else one.data_ptr(),
        )
        for key, one in captured.tensors.items()
        if not key.startswith("rng/")
    ]
    return json.dumps(encode_groups(captured)), captured.groups, tensors, captured.frozen


@pytest.mark.parametrize("change", CHANGES)
def test_a_capture_after_a_change_is_that_of_a_walk(change: str) -> None:
    """Whatever a loop changes between two saves, trees, JSON, ties, order and flags are those of a capture from new."""
    state, structure = made(), Structure()
    for _ in range(3):
        assert found(state, structure) == found(state, None)
    CHANGES[change](state)
    for _ in range(3):
        assert found(state, structure) == found(state, None)


def test_nothing_of_an_earlier_structure_is_mixed_with_a_later_one() -> None:
    """A loop that freezes a weight while a hook is there, and undoes both, has no frozen weight at the next save."""
    state, structure = made(), Structure()
    for _ in range(2):
        assert found(state, structure)[-1] == frozenset()
    hook = state["net"].register_state_dict_post_hook(lambda *_: None)
    state["net"].first.weight.requires_grad_(False)
    assert found(state, structure)[-1] == {"net/first.weight"}
    hook.remove()
    state["net"].first.weight.requires_grad_(True)
    for _ in range(2):
        assert found(state, structure) == found(state, None)


def test_what_stays_is_not_walked_again() -> None:
    """Without a change a module's tree is the same object in each save, through steps and schedules."""
    state, structure = made(), Structure()
    trees = []
    for _ in range(3):
        state["optimizer"].step()
        state["schedule"].step()
        captured = capture(state, structure=structure)
        assert (
            captured.groups["optimizer"].tree["param_groups"][0]["options"]["lr"] == state["schedule"].get_last_lr()[0]
        )
        trees.append((captured.groups["net"].tree, captured.groups["optimizer"].tree["state"]))
    assert all(one is other for tree in trees for one, other in zip(tree, trees[0], strict=True))


def test_no_tensor_is_held() -> None:
    """Memory that a loop frees between two saves is free: what a capture remembers keeps no tensor alive."""
    state, structure = made(), Structure()
    capture(state, structure=structure)
    held = [weakref.ref(one) for one in (state["net"], state["net"].first.weight, entry(state)["exp_avg"])]
    del state
    gc.collect()
    assert [one() for one in held] == [None] * 3
    assert capture(made(), structure=structure).groups
