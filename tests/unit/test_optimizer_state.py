"""Optimizers: after a restore they go on bit by bit, and no moment ever attaches to another parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt_tasks.errors import IntegrityError, StateError, StateMismatchError, UnsupportedStateError
from ckpt_tasks.state.capture import GroupState, capture, plan_restore
from ckpt_tasks.state.tensors import same_bits
from tests.unit.roundtrip import Saved, assert_same, restore, save

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
    return {"model": model, "optimizer": OPTIMIZERS[name](model.parameters(), **(options or {}))}  # type: ignore[call-arg]


def train(state: Mapping[str, Any], steps: int, first: int = 0) -> None:
    model, optimizer = state["model"], state["optimizer"]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(ids)
        loss.backward()
        return loss

    for step in range(first, first + steps):
        ids = torch.tensor([step % 6, (step * 5 + 1) % 6])
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        else:
            closure()
            optimizer.step()


def same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for group in one:
        assert_same({**one[group].state_dict()}, {**other[group].state_dict()}, group)


def test_the_list_of_optimizers_is_torchs() -> None:
    """Every optimizer of torch.optim is tried below; these are the ones known to be there."""
    assert {"Adam", "AdamW", "SGD", "LBFGS", "SparseAdam", "Adafactor", "Muon", "NAdam", "ASGD"} <= {*OPTIMIZERS}


@pytest.mark.parametrize(
    ("name", "options"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "default"
)
@pytest.mark.parametrize("dirty", [False, True], ids=["fresh", "dirty"])
def test_an_optimizer_goes_on_bit_by_bit(name: str, options: dict[str, Any], dirty: bool) -> None:
    """P12, P18: restored into a new optimizer or one that has run on, the next steps equal those without a stop."""
    state, fresh = build(name, options), build(name, options, seed=1)
    train(state, 3)
    saved = save(state)
    train(state, 4, first=3)
    if dirty:
        train(fresh, 5)
    restore(saved, fresh)
    train(fresh, 4, first=3)
    same_state(state, fresh)


def test_a_checkpoint_at_step_zero_empties_the_state() -> None:
    """P18, P27: restoring a state from before the first step removes the moments that are there."""
    saved, state = save(build()), build()
    train(state, 2)
    assert state["optimizer"].state
    restore(saved, state)
    assert not state["optimizer"].state
    train(state, 2)
    other = build()
    train(other, 2)
    same_state(state, other)


def test_moments_of_a_parameter_without_a_gradient_stay_absent() -> None:
    """P18: the unused parameter has no state after the restore either, the others have theirs."""
    state, fresh = build(), build(seed=1)
    train(state, 2)
    restore(save(state), fresh)
    model, optimizer = fresh["model"], fresh["optimizer"]
    assert model.spare.weight not in optimizer.state
    assert len(optimizer.state) == 3


def three(order: str = "abc", groups: int = 1, **options: Any) -> dict[str, Any]:
    """Return a module with three equal parameters, and an optimizer that got them in an order and in groups."""
    module = nn.ParameterDict({name: torch.zeros(2) for name in "abc"})
    params = [module[name] for name in order]
    lists = [params] if groups == 1 else [params[:1], params[1:]]
    optimizer = torch.optim.Adam([{"params": part} for part in lists], lr=0.1, **options)
    return {"model": module, "optimizer": optimizer}


def stepped(state: dict[str, Any]) -> dict[str, Any]:
    for n, name in enumerate("abc", start=1):
        state["model"][name].grad = torch.full((2,), float(n))
    state["optimizer"].step()
    return state


def moments(state: dict[str, Any]) -> dict[str, float]:
    found = state["optimizer"].state
    return {n: round(found[state["model"][n]]["exp_avg"][0].item(), 4) for n in "abc" if state["model"][n] in found}


def test_reordered_parameters_keep_their_own_moments() -> None:
    """P12: the order in which an optimizer got its parameters does not matter: moments go by name."""
    saved = save(stepped(three("abc")))
    fresh = three("cab")
    restore(saved, fresh)
    assert moments(fresh) == {"a": 0.1, "b": 0.2, "c": 0.3}


@pytest.mark.parametrize(
    ("fresh", "missing", "unexpected", "different"),
    [
        (three("ab"), (), ("optimizer/model/c",), ()),
        (three("abc", groups=2), (), (), ("optimizer ", "optimizer/model/b", "optimizer/model/c")),
    ],
    ids=["frozen", "grouped"],
)
def test_a_parameter_that_left_or_moved_is_an_error(
    fresh: dict[str, Any], missing: tuple[str, ...], unexpected: tuple[str, ...], different: tuple[str, ...]
) -> None:
    """P12: a parameter that was frozen (left out) or is in another group is named, and nothing is attached."""
    with pytest.raises(StateMismatchError) as caught:
        restore(save(stepped(three("abc"))), fresh)
    assert (caught.value.missing, caught.value.unexpected) == (missing, unexpected)
    assert len(caught.value.different) == len(different)
    assert all(text.startswith(place) for text, place in zip(caught.value.different, different, strict=True))
    assert not fresh["optimizer"].state
    assert all(p.eq(0).all() for p in fresh["model"].values())


def test_an_unfrozen_parameter_is_an_error() -> None:
    """P12: an optimizer that has a parameter more than the checkpoint is refused, with its name."""
    with pytest.raises(StateMismatchError) as caught:
        restore(save(stepped(three("ab"))), three("abc"))
    assert caught.value.missing == ("optimizer/model/c",)


def test_a_parameter_that_changed_places_between_groups_is_an_error() -> None:
    """P12: as many groups of the same sizes are not enough."""
    with pytest.raises(StateMismatchError) as caught:
        restore(save(stepped(three("abc", groups=2))), three("bac", groups=2))
    assert caught.value.different == (
        "optimizer/model/b (in param group 0 here, 1 in the checkpoint)",
        "optimizer/model/a (in param group 1 here, 0 in the checkpoint)",
    )


def test_a_parameter_with_its_gradients_switched_off_keeps_its_own_moments() -> None:
    """P12: as long as the optimizer has it, a frozen parameter's moments stay its own."""
    state = stepped(three())
    state["model"]["a"].requires_grad_(False)
    fresh = three("bca")
    restore(save(state), fresh)
    assert moments(fresh) == {"a": 0.1, "b": 0.2, "c": 0.3}


def test_two_modules_may_have_parameters_of_one_name() -> None:
    """P12: generator and discriminator in one optimizer: the group is part of the name."""

    def gan() -> dict[str, Any]:
        one, two = nn.Linear(2, 2), nn.Linear(2, 2)
        return {"g": one, "d": two, "optimizer": torch.optim.SGD([*one.parameters(), *two.parameters()], momentum=0.9)}

    state, fresh = gan(), gan()
    (state["g"](torch.ones(1, 2)).sum() + 2 * state["d"](torch.ones(1, 2)).sum()).backward()
    state["optimizer"].step()
    restore(save(state), {name: fresh[name] for name in ("optimizer", "d", "g")})
    same_state(state, fresh)


def test_a_shared_parameter_has_one_name_whatever_the_order_of_the_state() -> None:
    """P12: a trunk in two modules is one parameter to the optimizer, also when the state names the modules in another order."""

    def build_two() -> dict[str, Any]:
        trunk = nn.Linear(2, 2)
        policy, critic = nn.Sequential(trunk, nn.Linear(2, 1)), nn.Sequential(trunk, nn.Linear(2, 1))
        params = {*policy.parameters(), *critic.parameters()}
        return {"policy": policy, "critic": critic, "optimizer": torch.optim.Adam(sorted(params, key=id))}

    state, fresh = build_two(), build_two()
    (state["policy"](torch.ones(1, 2)) + 3 * state["critic"](torch.ones(1, 2))).sum().backward()
    state["optimizer"].step()
    restore(save(state), {name: fresh[name] for name in ("optimizer", "critic", "policy")})
    for name in ("policy", "critic"):
        for one, other in zip(state[name].parameters(), fresh[name].parameters(), strict=True):
            assert_same(dict(state["optimizer"].state[one]), dict(fresh["optimizer"].state[other]))


def test_without_its_module_an_optimizer_goes_by_its_own_names() -> None:
    """P12: `param_names` of the optimizer are used where no module of the state has the parameter."""

    def named(order: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        params = {name: nn.Parameter(torch.zeros(2)) for name in "abc"}
        return params, {"optimizer": torch.optim.Adam([(name, params[name]) for name in order], lr=0.1)}

    params, state = named("abc")
    for n, name in enumerate("abc", start=1):
        params[name].grad = torch.full((2,), float(n))
    state["optimizer"].step()
    other, fresh = named("cba")
    restore(save(state), fresh)
    for name in "abc":
        assert_same(dict(state["optimizer"].state[params[name]]), dict(fresh["optimizer"].state[other[name]]))
    assert fresh["optimizer"].param_groups[0]["param_names"] == ["c", "b", "a"]


def test_without_any_names_shapes_must_agree() -> None:
    """P12, P50: parameters known by position only are compared by shape, since nothing else tells them apart."""

    def bare(*shapes: tuple[int, ...]) -> dict[str, Any]:
        params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = torch.optim.Adam(params)
        optimizer.step()
        return {"optimizer": optimizer}

    saved = save(bare((2,), (3, 1)))
    with pytest.raises(StateMismatchError) as caught:
        restore(saved, bare((3, 1), (2,)))
    assert caught.value.different == (
        "optimizer/#0.0 ([3, 1] here, [2] in the checkpoint)",
        "optimizer/#0.1 ([2] here, [3, 1] in the checkpoint)",
    )
    fresh = bare((2,), (3, 1))
    restore(saved, fresh)
    assert saved.groups["optimizer"].tree["shapes"] == {"#0.0": [2], "#0.1": [3, 1]}


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
    """P14: `initial_lr` and the present lr are options of the group; a fresh scheduler goes on from there."""
    state, fresh = three(), three()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(state["optimizer"], gamma=0.5)
    state["optimizer"].step()
    scheduler.step()
    restore(save(state), fresh)
    group = fresh["optimizer"].param_groups[0]
    assert (group["lr"], group["initial_lr"]) == (0.05, 0.1)
    again = torch.optim.lr_scheduler.ExponentialLR(fresh["optimizer"], gamma=0.5, last_epoch=1)
    assert again.base_lrs == [0.1]


def test_param_groups_stay_the_objects_that_they_are() -> None:
    """P14: who holds a param group, its list of parameters or its lr tensor sees the restored values there."""
    state, fresh = three(), three()
    for each, lr in ((state, 0.25), (fresh, 0.5)):
        each["optimizer"].param_groups[0]["lr"] = torch.tensor(lr)
    group = fresh["optimizer"].param_groups[0]
    params, lr_tensor = group["params"], group["lr"]
    restore(save(state), fresh)
    assert fresh["optimizer"].param_groups[0] is group
    assert group["params"] is params
    assert group["lr"] is lr_tensor
    assert lr_tensor.item() == 0.25


def test_an_option_that_the_checkpoint_lacks_has_its_default() -> None:
    """P59: an option that a newer torch added gets the optimizer's default, not an error at the next step."""
    saved = save(stepped(three()))
    groups = saved.groups
    del groups["optimizer"].tree["param_groups"][0]["options"]["amsgrad"]
    fresh = three()
    plan_restore(fresh, groups, saved.stored).apply(saved.tensors)
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


def test_two_entries_in_one_tensor_here_do_not_overwrite_each_other() -> None:
    """P4: where the target keeps two entries in one tensor and the checkpoint in two, each gets its own."""
    saved, state = save(stepped(three())), stepped(three())
    entry = state["optimizer"].state[state["model"]["a"]]
    entry["exp_avg_sq"] = entry["exp_avg"]
    restore(saved, state)
    other = stepped(three())
    assert_same({**other["optimizer"].state_dict()}, {**state["optimizer"].state_dict()})


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


def test_state_of_no_parameter_comes_back() -> None:
    """P12: what an optimizer keeps under a key that is no parameter is part of its state."""
    state, fresh = three(), three()
    state["optimizer"].state["shared"] = {"count": 0, "buffer": torch.arange(3)}
    fresh["optimizer"].state["stale"] = 1
    restore(save(state), fresh)
    assert [*fresh["optimizer"].state] == ["shared"]
    assert_same(state["optimizer"].state["shared"], fresh["optimizer"].state["shared"])


class Looking(torch.optim.SGD):
    """An optimizer with slow weights of its own, saved by its own methods."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.slow = torch.zeros(2)
        self.fails = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow = state_dict["slow"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "slow"})
        if self.fails:
            self.fails = False
            raise RuntimeError("half-way")


def looking(order: str) -> dict[str, Any]:
    module = nn.ParameterDict({name: torch.zeros(2) for name in "abc"})
    return {"model": module, "optimizer": Looking([module[name] for name in order], 0.1)}


def test_an_optimizer_with_its_own_methods_is_asked_and_still_goes_by_name() -> None:
    """P12: a subclass that overrides state_dict gets its own state back, in the target's order of parameters."""
    state, fresh = stepped(looking("abc")), looking("bca")
    state["optimizer"].slow = torch.tensor([1.0, 2.0])
    restore(save(state), fresh)
    assert fresh["optimizer"].slow.tolist() == [1.0, 2.0]
    for name in "abc":
        entry = fresh["optimizer"].state[fresh["model"][name]]
        assert_same(dict(state["optimizer"].state[state["model"][name]]), dict(entry))


def test_an_optimizer_that_raises_half_way_is_put_back() -> None:
    """P50: when its own load_state_dict raises, the optimizer has its old state and the module was not touched."""
    saved, target = save(stepped(looking("abc"))), stepped(stepped(looking("abc")))
    before = save(target)
    target["optimizer"].fails = True
    with pytest.raises(StateError, match="half-way") as caught:
        restore(saved, target)
    assert caught.value.key == "optimizer"
    assert_equal(before, save(target))


def assert_equal(one: Saved, other: Saved) -> None:
    assert one.manifest == other.manifest
    assert_same(one.tensors, other.tensors)


def test_hooks_of_an_optimizer_run() -> None:
    """P12: an optimizer with hooks is restored through load_state_dict, so that they run."""
    state, fresh = stepped(three()), three()
    calls: list[str] = []
    fresh["optimizer"].register_load_state_dict_post_hook(lambda _: calls.append("post"))
    restore(save(state), fresh)
    assert calls == ["post"]
    same_state(state, fresh)


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
    from ckpt_tasks.state.optimizers import _device

    parameter = torch.zeros(1, device=parameter_on)
    assert _device("step", parameter=parameter, options=options, on_cpu=on_cpu).type == where
    assert _device("exp_avg", parameter=parameter, options=options, on_cpu=on_cpu).type == parameter_on


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": False}, {"foreach": True}])
def test_the_step_tensor_keeps_its_dtype(options: dict[str, Any]) -> None:
    """P17: `step` is a float32 tensor of rank 0 before and after."""
    state, fresh = stepped(three(**options)), three(**options)
    restore(save(state), fresh)
    (entry, *_) = fresh["optimizer"].state.values()
    assert_same(torch.tensor(1.0), entry["step"])


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


def test_an_optimizer_of_another_form_is_refused() -> None:
    """P12: a state_dict that is not torch's form cannot be keyed by name and is refused, not guessed at."""

    class Odd(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"everything": 1}

    with pytest.raises(UnsupportedStateError, match="not torch's"):
        capture({"optimizer": Odd(nn.Linear(1, 1).parameters())})


@pytest.mark.parametrize(
    "spoil", [lambda t: t.pop("param_groups"), lambda t: t.update(state=3), lambda t: t.pop("on_cpu")]
)
def test_a_malformed_tree_is_damage(spoil: Callable[[dict[str, Any]], object]) -> None:
    """P49: a tree that capture cannot have made is an IntegrityError, so that an older checkpoint is tried."""
    saved = save(stepped(three()))
    tree = saved.groups["optimizer"].tree
    spoil(tree)
    with pytest.raises(IntegrityError, match="malformed"):
        plan_restore(three(), {**saved.groups, "optimizer": GroupState("optimizer", tree)}, saved.stored)


def test_restored_moments_do_not_share_memory_with_the_source() -> None:
    """P3: what a restore made new outlives the buffers that it was made from."""
    saved, fresh = save(stepped(three())), three()
    plan = plan_restore(fresh, saved.groups, saved.stored)
    staging = {key: saved.tensors[key].clone() for key in plan.keys}
    plan.apply(staging)
    for tensor in staging.values():
        tensor.zero_()
    assert moments(fresh) == {"a": 0.1, "b": 0.2, "c": 0.3}
    assert not same_bits(fresh["model"]["a"], torch.zeros(2))
