"""Optimizers: moments go by the names of the parameters, and never attach to another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks.errors import IntegrityError, StateError, StateMismatchError, UnsupportedStateError
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.kinds.group_parts import GroupState
from ckpt_tasks.state.restoring import plan_restore
from tests.support.optimizers import moments, same_state, stepped, three
from tests.support.roundtrip import Saved, assert_same, restore, save


@pytest.mark.parametrize("frozen", [False, True])
def test_reordered_parameters_keep_their_own_moments(frozen: bool) -> None:
    """P12: moments go by name, whatever the order in which an optimizer got its parameters, and frozen ones' too."""
    state, fresh = stepped(three("abc")), three("cab")
    state["model"]["a"].requires_grad_(not frozen)
    restore(save(state), fresh)
    assert moments(fresh) == {"a": 0.1, "b": 0.2, "c": 0.3}


@pytest.mark.parametrize(
    ("stored", "fresh", "missing", "unexpected", "different"),
    [
        (three("abc"), three("ab"), (), ("optimizer/model/c",), ()),
        (three("ab"), three("abc"), ("optimizer/model/c",), (), ()),
        (
            three("abc"),
            three("abc", groups=2),
            (),
            (),
            ("optimizer ", "optimizer/model/b", "optimizer/model/c"),
        ),
        (
            three("abc", groups=2),
            three("bac", groups=2),
            (),
            (),
            ("optimizer/model/b (in param group 0 here, 1 in", "optimizer/model/a (in param group 1 here, 0 in"),
        ),
    ],
    ids=["frozen", "unfrozen", "grouped", "exchanged"],
)
def test_a_parameter_that_left_or_moved_is_an_error(
    stored: Any, fresh: Any, missing: tuple[str, ...], unexpected: tuple[str, ...], different: tuple[str, ...]
) -> None:
    """P12: a parameter that one side lacks, or that is in another group, is named, and nothing is attached."""
    with pytest.raises(StateMismatchError) as caught:
        restore(save(stepped(stored)), fresh)
    assert (caught.value.missing, caught.value.unexpected) == (missing, unexpected)
    assert all(text.startswith(place) for text, place in zip(caught.value.different, different, strict=True))
    assert not fresh["optimizer"].state
    assert all(p.eq(0).all() for p in fresh["model"].values())


def test_a_shared_parameter_has_one_name_whatever_the_order_of_the_state() -> None:
    """P12: a trunk in two modules is one parameter, also when the state names the modules in another order."""

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

    def named(order: str) -> tuple[dict[str, nn.Parameter], dict[str, Any]]:
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


def test_state_of_no_parameter_comes_back() -> None:
    """P12: what an optimizer keeps under a key that is not a parameter is part of its state."""
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
