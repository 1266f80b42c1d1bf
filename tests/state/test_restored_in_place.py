"""Plain values that somebody else holds as well: restored where they are, or refused."""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from ckpt_tasks.errors import StateMismatchError, UnsupportedStateError
from ckpt_tasks.state.capture import capture
from tests.state.test_capture_values import VALUES, Pair
from tests.support.roundtrip import Holder, assert_same, restore, same_module, save, trip


@pytest.mark.parametrize("wrap", [lambda d: d, dict, lambda d: {"inside": [d]}], ids=["odict", "dict", "nested"])
def test_a_modules_state_dict_restores_the_module(wrap: Any) -> None:
    """P20: what every torch.save user writes, `model.state_dict()`, reaches the module that it came from."""
    model, fresh = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    saved = save({"model": wrap(model.state_dict())})
    restore(saved, {"model": wrap(fresh.state_dict())})
    same_module(model, fresh)


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (nn.Linear(3, 2), "model/weight (float32[2, 3] here"),
        (nn.Linear(2, 2).double(), "model/weight (float64[2, 2] here"),
        (nn.Linear(2, 2, bias=False), "only in the checkpoint: model/bias"),
        (nn.PReLU(), "not in the checkpoint: model/weight"),
    ],
    ids=["shape", "dtype", "fewer", "more"],
)
@pytest.mark.parametrize("wrap", [lambda d: d, dict], ids=["odict", "dict"])
def test_what_would_not_reach_the_module_is_an_error(here: nn.Module, said: str, wrap: Any) -> None:
    """P50: a tensor of a live module is not replaced in its dict behind the module's back."""
    layer = nn.Linear(2, 2)
    saved = save({"model": wrap(layer.state_dict() if not isinstance(here, nn.PReLU) else {})}, rng=False)
    before = copy.deepcopy(here.state_dict())
    with pytest.raises(StateMismatchError) as caught:
        restore(saved, {"model": wrap(here.state_dict())}, rng=False)
    assert said in str(caught.value)
    assert_same(dict(before), dict(here.state_dict()))


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: {"a": [d]}], ids=["top", "nested"])
def test_the_state_dict_of_an_optimizer_is_refused(kind: Any, steps: int, wrap: Any) -> None:
    """P20: a restore into it would reach nothing, so a save refuses it, before the first step and after it."""
    optimizer = kind(nn.Linear(2, 2).parameters())
    for _ in range(steps):
        stepped(optimizer)
    state = {"optimizer": wrap(optimizer.state_dict())}
    with pytest.raises(UnsupportedStateError, match="optimizer': optimizer") as caught:
        capture(state)
    assert caught.value.key is not None
    assert caught.value.key.startswith("optimizer")
    with pytest.raises(UnsupportedStateError, match=r"state_dict\(\) of an optimizer"):
        restore(save({"optimizer": 0}), state)


def test_the_state_dicts_of_schedules_and_scalers_are_refused() -> None:
    """P14, P16: their numbers are copies: a restore into them would reach nothing."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    for one in (
        torch.optim.lr_scheduler.StepLR(optimizer, 3),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.amp.GradScaler("cpu"),
    ):
        with pytest.raises(UnsupportedStateError, match="Give the object itself"):
            capture({"it": one.state_dict()})


def test_a_module_with_an_extra_state_is_not_restored_through_a_dict() -> None:
    """P8: what get_extra_state gave would not reach set_extra_state."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"n": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(UnsupportedStateError, match="extra state"):
        capture({"model": Extra(2, 2).state_dict()})


def test_memory_shared_between_groups_is_shared_again() -> None:
    """P4: a plain value that showed a parameter when it was saved shows it after a restore into an empty one."""
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    saved = save({"model": model, "shown": [model.weight.detach(), model.bias, model.weight.detach().numpy()]})
    assert {*saved.tensors} == {"model/weight", "model/bias", *(key for key in saved.tensors if key.startswith("rng/"))}
    state: dict[str, Any] = {"shown": [], "model": fresh}
    restore(saved, state)
    weight, bias, array = state["shown"]
    assert bias is fresh.bias
    assert not weight.requires_grad
    with torch.no_grad():
        fresh.weight.fill_(7.0)
    assert weight.eq(7).all()
    assert (array == 7).all()


def test_a_tuple_of_what_is_refilled_stays_the_same() -> None:
    """What else refers to a tuple sees the restored values in it, since its parts are restored in place."""
    held = {"pair": (pair := ([7], torch.zeros(2)))}
    restore(save({"it": {"pair": ([1, 2], torch.ones(2))}}), {"it": held})
    assert held["pair"] is pair
    assert pair[0] == [1, 2]
    assert pair[1].tolist() == [1.0, 1.0]


def test_tensors_without_elements_share_nothing() -> None:
    """P4, P6: two empty tensors of one shape have one address, and come back as two that grow each by itself."""
    state: dict[str, Any] = {"shown": []}
    restore(save({"shown": [torch.empty(0, 3), torch.empty(0, 3)]}), state)
    one, other = state["shown"]
    one.resize_(1, 3)
    assert other.shape == (0, 3)


def test_overlapping_memory_that_cannot_hold_the_values_is_an_error() -> None:
    """P5: two views of the same memory, in one group or in two, do not overwrite each other without a word."""
    saved = save({"one": Holder(t=torch.zeros(3)), "two": Holder(t=torch.ones(3)), "w": torch.arange(9.0).view(3, 3)})
    base, windows, long = torch.full((5,), 9.0), torch.full((5,), 9.0), torch.full((7,), 9.0)
    for state in (
        {"one": Holder(t=base[:3]), "two": Holder(t=base[1:4]), "w": torch.zeros(3, 3)},
        {"one": Holder(t=base[:3]), "two": Holder(t=base[:3]), "w": torch.zeros(3, 3)},
        {"one": Holder(t=long[::3]), "two": Holder(t=long[4:]), "w": torch.zeros(3, 3)},
        {"one": Holder(t=torch.zeros(3)), "two": Holder(t=torch.zeros(3)), "w": windows.unfold(0, 3, 1)},
    ):
        with pytest.raises(StateMismatchError, match="here, but"):
            restore(saved, state)
    assert base.eq(9).all()
    assert windows.eq(9).all()
    assert long.eq(9).all()
    every_other = {"one": Holder(t=base[::2]), "two": Holder(t=torch.zeros(3)), "w": torch.zeros(3, 3)}
    restore(saved, every_other)
    assert base.tolist() == [0.0, 9.0, 0.0, 9.0, 0.0]


# ── any value, any change ─────────────────────────────────────────────────────────────────────────────────────


def tensors() -> st.SearchStrategy[Any]:
    def make(shape: list[int], dtype: torch.dtype, how: str) -> Any:
        dense = torch.randint(0, 100, shape).to(dtype)
        if how == "array":
            return dense.numpy()
        if how == "backwards":
            return dense.numpy()[::-1] if shape else dense.numpy()
        return dense.t() if how == "turned" and len(shape) == 2 else dense

    shapes = st.lists(st.integers(0, 3), max_size=2)
    return st.builds(
        make,
        shapes,
        st.sampled_from([torch.float32, torch.int64]),
        st.sampled_from(["tensor", "array", "backwards", "turned"]),
    )


IMMUTABLE = [one for one in VALUES if not isinstance(one, dict | list | set | deque | bytearray | np.ndarray | tuple)]


def values() -> st.SearchStrategy[Any]:
    odd = st.sampled_from(["a/b", "~2", "__metadata__", "value", "\ud800"])
    flat = st.one_of(st.text(max_size=2), st.integers(0, 3), st.booleans(), st.none(), st.floats(allow_nan=False), odd)
    keys = flat | st.lists(flat, max_size=2).map(tuple) | st.frozensets(flat, max_size=2)
    numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
    leaves = numbers | tensors() | st.sampled_from(IMMUTABLE)

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 3, 4])),
            st.dictionaries(keys, inner, max_size=4),
            st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
            st.dictionaries(keys, inner, max_size=2).map(lambda value: defaultdict(list, value)),
            st.builds(Pair, inner, inner),
            st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
            st.sets(st.one_of(st.integers(0, 9), st.text(max_size=1)), max_size=3),
            inner.map(lambda one: [one, one]),
        )

    return st.recursive(leaves, containers, max_leaves=12)


def copied(value: Any) -> Any:
    """Copy a value and leave nothing shared; strides stay."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        twin = copy.copy(value)
        for key, item in value.items():
            twin[key] = copied(item)
        return twin
    if isinstance(value, Pair):
        return Pair(*map(copied, value))
    if isinstance(value, deque):
        return deque(map(copied, value), value.maxlen)
    return type(value)(map(copied, value)) if isinstance(value, (list, tuple)) else copy.copy(value)


def parts_of(value: Any, place: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """List every container and tensor of a value by its place."""
    if isinstance(value, (torch.Tensor, np.ndarray, set)):
        return {place: value}
    if isinstance(value, dict):
        items = [*value.items()]
    elif isinstance(value, (list, tuple, deque)):
        items = [*enumerate(value)]
    else:
        return {}
    found = {place: value}
    for key, item in items:
        found |= parts_of(item, (*place, repr(key)))
    return found


def change(value: Any, data: st.DataObject, seen: set[int]) -> None:
    """Change some containers and tensors in place, as training does."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        value.add_(1)
        return
    if isinstance(value, np.ndarray):
        value += 1
        return
    children = (
        [*value.values()] if isinstance(value, dict) else [*value] if isinstance(value, (list, tuple, deque)) else []
    )
    for child in children:
        change(child, data, seen)
    how = data.draw(st.sampled_from(["keep", "clear", "add", "drop"]))
    if isinstance(value, (list, deque, dict, set)):
        if how == "clear":
            value.clear()
        elif how == "drop" and value:
            value.popitem() if isinstance(value, dict) else value.pop()
        elif how == "add" and isinstance(value, dict):
            value["new"] = 1
        elif how == "add" and isinstance(value, set):
            value.add("new")
        elif how == "add" and isinstance(value, (list, deque)):
            value.append(data.draw(values()))


@settings(deadline=None)
@given(value=values(), data=st.data())
def test_a_changed_value_is_restored_into_its_own_objects(value: Any, data: st.DataObject) -> None:
    """P20: save, change anything, restore: every value and type is as it was, and every object that can stay stays."""
    state = {"it": value}
    if not any(isinstance(one, np.ndarray) and min((*one.strides, 0)) < 0 for one in parts_of(value).values()):
        state["again"] = value  # a backwards array is stored as a copy: not seen to be one thing in two places
    saved, before = save(state, rng=False), copied(value)
    assert all(key.encode() and not key.endswith("/__metadata__") for key in saved.tensors), "a file can hold it"
    assert_same(trip(value), before)
    change(value, data, set())
    held = {name: parts_of(state[name]) for name in state}
    restore(saved, state, rng=False)
    for name, restored in state.items():
        assert_same(restored, before)
        now = parts_of(restored)
        for place, one in held[name].items():
            other = now.get(place)
            if stays(one, other, held[name], now, place):
                assert other is one, place
    assert save(state, rng=False).manifest == saved.manifest


def stays(one: Any, other: Any, held: Any, now: Any, place: tuple[Any, ...]) -> bool:
    """Say whether the object at a place could take what was saved there."""
    if type(one) is not type(other) or isinstance(one, tuple) or len({*map(id, held.values())}) < len(held):
        return False
    if any(type(held[place[:n]]) is not type(now[place[:n]]) for n in range(len(place))):
        return False  # it is inside of something that was replaced
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return bool(one.shape == other.shape and one.dtype == other.dtype)
    return not isinstance(one, deque) or one.maxlen == other.maxlen


def test_many_tensors_in_one_dict_cost_by_their_number() -> None:
    """A restore of twice as many tensors makes twice as many calls, not four times."""

    def calls_of(number: int) -> int:
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in {"call", "c_call"}

        state = {"many": {f"k{n}": torch.ones(1) for n in range(number)}}
        saved = save(state, rng=False)
        sys.setprofile(count)
        try:
            restore(saved, state, rng=False)
        finally:
            sys.setprofile(None)
        return calls

    calls_of(1)  # it imports
    assert calls_of(800) < 3 * calls_of(400)
