"""Optimizers: after a restore they go on bit by bit, and no moment ever attaches to another parameter."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt_tasks.errors import StateMismatchError, UnsupportedStateError
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.kinds.optimizers import device_of_entry
from ckpt_tasks.state.restoring import plan_restore
from ckpt_tasks.state.tensors.tensor_sources import HeldTensors
from tests.support.optimizers import moments, same_state, stepped, three
from tests.support.roundtrip import assert_same, restore, save

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OPTIMIZERS),
    *((name, {"foreach": False}) for name in ("Adam", "SGD", "RMSprop", "NAdam", "ASGD")),
    *((name, {"foreach": True}) for name in ("Adam", "SGD", "Adagrad", "Rprop")),
    *((name, {"fused": True}) for name in ("Adam", "AdamW", "SGD", "Adagrad")),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {"amsgrad": True, "maximize": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("LBFGS", {"line_search_fn": "strong_wolfe", "history_size": 3}),
]


class Model(nn.Module):
    """Matrices only, so that Muon takes them; one of them frozen, one never used."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, sparse=sparse)
        self.layers = nn.ModuleList([] if sparse else [nn.Linear(4, 4, bias=False) for _ in range(2)])
        self.spare = nn.Embedding(2, 4, sparse=sparse)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def build(name: str = "Adam", options: Mapping[str, Any] | None = None, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Model(sparse=name == "SparseAdam")
    return {"model": model, "optimizer": OPTIMIZERS[name](model.parameters(), **(options or {}))}


def train(state: Mapping[str, Any], steps: int, first: int = 0) -> None:
    model, optimizer = state["model"], state["optimizer"]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for step in range(first, first + steps):
        ids = torch.tensor([step % 6, (step * 5 + 1) % 6])
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        else:
            closure()
            optimizer.step()


@pytest.mark.parametrize(
    ("name", "options"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "default"
)
@pytest.mark.parametrize("dirty", [False, True], ids=["fresh", "dirty"])
def test_an_optimizer_goes_on_bit_by_bit(name: str, options: dict[str, Any], dirty: bool) -> None:
    """P12, P18, P27: into a new optimizer or one that has run on: the next steps equal those without a stop."""
    state, fresh = build(name, options), build(name, options, seed=1)
    begin = save(state)
    train(state, 3)
    saved = save(state)
    train(state, 4, first=3)
    if dirty:
        train(fresh, 5)
        restore(begin, fresh)  # of step 0: it removes the moments that are there
        assert save(fresh).manifest == begin.manifest
        train(fresh, 1)
    restore(saved, fresh)
    train(fresh, 4, first=3)
    same_state(state, fresh)


def test_an_empty_param_group_keeps_its_options() -> None:
    """P13: a group without parameters comes back with its learning rate and betas."""

    def build_empty(lr: float) -> dict[str, Any]:
        module = nn.Linear(2, 2)
        groups = [{"params": []}, {"params": module.parameters()}]
        optimizer = torch.optim.Adam(groups)  # type: ignore[arg-type]
        optimizer.param_groups[0] |= {"lr": lr, "betas": (0.5, lr)}
        return {"model": module, "optimizer": optimizer}

    state, fresh = build_empty(0.0), build_empty(0.7)
    restore(save(state), fresh)
    assert fresh["optimizer"].param_groups[0]["lr"] == 0.0
    same_state(state, fresh)


def test_options_come_back_with_what_a_scheduler_added() -> None:
    """P14, P58: `initial_lr` and the present lr are options of the group, which stays the object that it is.

    A fresh schedule goes on from there; a torch whose optimizer has one option more does not miss what it notes.
    """
    state, fresh = three(), three()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(state["optimizer"], gamma=0.5)
    state["optimizer"].step()
    scheduler.step()
    group = fresh["optimizer"].param_groups[0]
    group["lr"] = lr = torch.tensor(0.5)
    params = group["params"]
    fresh["optimizer"].defaults["newer"] = group["newer"] = False
    restore(save(state), fresh)
    assert fresh["optimizer"].param_groups[0] is group
    assert group["params"] is params
    assert (group["lr"], group["initial_lr"]) == (0.05, 0.1)
    assert lr.item() == 0.5
    again = torch.optim.lr_scheduler.ExponentialLR(fresh["optimizer"], gamma=0.5, last_epoch=1)
    assert again.base_lrs == [0.1]
    held, other = three(), three()
    held["optimizer"].param_groups[0]["lr"], other["optimizer"].param_groups[0]["lr"] = lr, torch.tensor(0.25)
    restore(save(other), held)
    assert held["optimizer"].param_groups[0]["lr"] is lr
    assert lr.item() == 0.25


def test_options_of_another_torch_are_no_other_kind_of_optimizer() -> None:
    """P58, P59: an option that the checkpoint lacks has its default; one that only it has changes nothing."""
    for lacking in (True, False):
        saved = save(stepped(three()))
        groups, fresh = saved.groups, three()
        options = groups["optimizer"].tree["param_groups"][0]["options"]
        if lacking:
            del options["amsgrad"]
        else:
            options["newer"] = False
        plan_restore(fresh, groups, saved.stored).apply(HeldTensors(saved.tensors))
        assert fresh["optimizer"].param_groups[0]["amsgrad"] is False
        stepped(fresh)


def test_moments_that_are_there_are_copied_into() -> None:
    """P17: a captured graph holds the addresses of the state: equal shapes and dtypes keep their memory."""
    saved, state = save(stepped(three())), stepped(stepped(three()))
    before = {name: state["optimizer"].state[p]["exp_avg"] for name, p in state["model"].items()}
    restore(saved, state)
    for name, p in state["model"].items():
        assert state["optimizer"].state[p]["exp_avg"] is before[name]
    assert moments(state) == {"a": 0.1, "b": 0.2, "c": 0.3}


@pytest.mark.parametrize("other", [torch.zeros(2, dtype=torch.float64), torch.zeros(3, 2), None, 0.5, "exp_avg_sq"])
def test_moments_of_another_form_are_replaced(other: Any) -> None:
    """P17, P50: what has another dtype, shape or type here is replaced; nothing is cast, nor two put in one tensor."""
    saved, state = save(stepped(three())), stepped(three())
    entry = state["optimizer"].state[state["model"]["a"]]
    entry["exp_avg"] = other if other != "exp_avg_sq" else entry[other]
    restore(saved, state)
    same_state(stepped(three()), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_is_never_cast_to_the_dtype_of_its_parameter(dtype: torch.dtype) -> None:
    """P17: float32 state of a 16-bit parameter keeps its bits (Optimizer.load_state_dict would round them)."""

    def build_low() -> dict[str, Any]:
        module = nn.ParameterDict({"w": nn.Parameter(torch.zeros(4, dtype=dtype))})
        return {"model": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}

    state, fresh = build_low(), build_low()
    master = torch.randn(4)
    state["optimizer"].state[state["model"]["w"]] = {
        "master": master,
        "step": 7,
        "scale": torch.tensor(3, dtype=torch.int64),
    }
    restore(save(state), fresh)
    assert_same({"master": master, "step": 7, "scale": torch.tensor(3)}, fresh["optimizer"].state[fresh["model"]["w"]])


@pytest.mark.parametrize(
    ("parameter_on", "options", "on_cpu", "where"),
    [
        ("cpu", {}, None, "cpu"),
        ("meta", {}, None, "cpu"),
        ("meta", {"fused": True}, None, "meta"),
        ("meta", {"capturable": True}, None, "meta"),
        ("meta", {}, [], "meta"),
        ("meta", {"fused": True}, ["step"], "cpu"),
    ],
)
def test_a_step_count_goes_where_the_kernel_reads_it(
    parameter_on: str, options: dict[str, Any], on_cpu: list[str] | None, where: str
) -> None:
    """P17: `step` is made where it was, and where nothing is known (all was on the CPU) where torch would have it."""
    parameter = torch.zeros(1, device=parameter_on)
    assert device_of_entry("step", parameter=parameter, options=options, on_cpu=on_cpu).type == where
    assert device_of_entry("exp_avg", parameter=parameter, options=options, on_cpu=on_cpu).type == parameter_on


def test_what_cannot_be_stored_in_an_optimizer_is_refused_by_path() -> None:
    """P7: a lambda in an option and an object in the state are refused with their paths."""
    state = three()
    state["optimizer"].param_groups[0]["schedule"] = lambda step: step
    with pytest.raises(UnsupportedStateError) as caught:
        capture(state)
    assert caught.value.key == "optimizer/param_groups/0/schedule"
    state = stepped(three())
    state["optimizer"].state[state["model"]["b"]]["odd"] = object()
    with pytest.raises(UnsupportedStateError) as caught:
        capture(state)
    assert caught.value.key == "optimizer/model/b/odd"


@pytest.mark.parametrize(("saved", "here"), [("Adam", "RMSprop"), ("Adam", "SGD"), ("SGD", "Adam")])
def test_another_kind_of_optimizer_is_refused(saved: str, here: str) -> None:
    """P58: options and moments of another kind are not mixed with this one's, and nothing is touched."""
    source, target = build(saved), build(here, seed=1)
    train(source, 2)
    weights = target["model"].embed.weight.clone()
    with pytest.raises(StateMismatchError, match="another kind of optimizer: one with"):
        restore(save(source), target)
    assert torch.equal(target["model"].embed.weight, weights)


def test_what_groups_share_they_share_again() -> None:
    """P4: moments of two optimizers, a plain tensor and an array that were one memory are so again."""

    def make(steps: int) -> dict[str, Any]:
        weight = nn.Parameter(torch.ones(3))
        one, other = torch.optim.Adam([weight]), torch.optim.Adam([weight])
        for _ in range(steps):
            weight.sum().backward()  # type: ignore[no-untyped-call]
            one.step()
            other.step()
            other.state[weight]["exp_avg"] = one.state[weight]["exp_avg"]
        moment = one.state[weight]["exp_avg"] if steps else None
        plain = {"t": moment, "n": moment.numpy() if moment is not None else None}
        return {"net": nn.ParameterList([weight]), "one": one, "other": other, "plain": plain}

    state = make(2)
    saved = save(state)
    for fresh in (make(0), make(1), make(1) | {"plain": {"t": None, "n": None}}):
        restore(saved, fresh)
        one, other = (fresh[name].state[fresh["net"][0]] for name in ("one", "other"))
        assert_same(one, state["one"].state[state["net"][0]])
        others = other["exp_avg"], fresh["plain"]["t"], torch.from_numpy(fresh["plain"]["n"])
        assert {shown.data_ptr() for shown in others} == {one["exp_avg"].data_ptr()}
        assert one["exp_avg_sq"].data_ptr() != other["exp_avg_sq"].data_ptr()


def test_a_rate_that_a_plateau_has_lowered_is_no_other_setting() -> None:
    """P50: nothing is said of a rate that the schedule lowers from the program's own; of any other rate it is said."""

    def made(lr: float) -> tuple[dict[str, Any], torch.optim.lr_scheduler.ReduceLROnPlateau]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
        return {"optimizer": optimizer}, schedule  # As in a framework that keeps the schedule's state itself.

    state, schedule = made(0.1)
    for _ in range(3):
        schedule.step(1.0)
    lowered = state["optimizer"].param_groups[0]["lr"]
    assert lowered == pytest.approx(0.009)
    saved = save(state)
    for lr, said in ((0.1, ()), (0.2, (f"optimizer lr: {lowered} → 0.2. {lowered} is restored.",))):
        state, schedule = made(lr)
        assert plan_restore(state, saved.groups, saved.stored).replaced == said
        del schedule
