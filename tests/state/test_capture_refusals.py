"""Modules: what is refused, by name and before anything is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from ckpt_tasks.errors import IntegrityError, StateMismatchError, UnsupportedStateError
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.restoring import plan_restore
from ckpt_tasks.state.tensors.placements import local_of
from ckpt_tasks.state.tensors.tensors import same_bits
from tests.support.roundtrip import Holder, one_rank, restore, same_module, save


class Tagged(nn.Parameter):
    """A subclass that says something about a parameter and changes nothing."""


class Counting(torch.Tensor):
    """A subclass with a mind of its own: what it is, its bytes do not say."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def counting() -> torch.Tensor:
    return torch.ones(3).as_subclass(Counting)


@pytest.mark.filterwarnings("ignore:.*(quantize|prototype|sparse|Sparse).*")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (quantized, "torch.qint8"),
        (nested, "a nested tensor"),
        (counting, "Counting"),
        (lambda: torch.empty(3, device="meta"), "meta device"),
    ],
)
def test_what_has_no_plain_values_is_refused_by_name(make: Any, said: str) -> None:
    """P7: quantised, nested and meta tensors and subclasses are refused when planning, with their path."""
    with pytest.raises(UnsupportedStateError, match=said) as caught:
        capture({"model": nn.Sequential(Holder(odd=make()))})
    assert caught.value.key == "model/0.odd"
    assert caught.value.hint
    fresh = nn.Sequential(Holder(odd=make()))
    with pytest.raises(UnsupportedStateError, match=said):
        restore(save({"model": nn.Sequential(Holder(odd=torch.ones(3)))}), {"model": fresh})


def test_a_dtensor_of_one_rank_is_whole() -> None:
    """P7: a distributed tensor is stored under its whole shape, and comes back into one or into a plain tensor."""
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])
        saved = save({"model": Holder(odd=tensor)})
        fresh = Holder(odd=distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))
        restore(saved, {"model": fresh})
        assert torch.equal(local_of(fresh.get_buffer("odd")), torch.arange(3.0))
        plain = Holder(odd=torch.zeros(3))
        restore(saved, {"model": plain})
        assert torch.equal(plain.get_buffer("odd"), torch.arange(3.0))


def test_a_tensor_that_is_not_reduced_is_refused_by_name() -> None:
    """P7: a DTensor whose parts still have to be added up has no values to store."""
    with one_rank():
        partial = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (1,)), [Partial()], run_check=False)
        with pytest.raises(UnsupportedStateError, match="redistribute") as caught:
            capture({"model": Holder(odd=partial)})
    assert caught.value.key == "model/odd"


def test_a_parameter_subclass_that_holds_its_data_is_fine() -> None:
    """P7: a marker on a parameter stays: the restore is in place."""
    module, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    fresh.weight = Tagged(torch.zeros(2, 2))
    restore(save({"model": module}), {"model": fresh})
    assert type(fresh.weight) is Tagged
    assert same_bits(fresh.weight, module.weight)
    restore(save({"model": fresh}), {"model": module})


def test_a_lazy_module_takes_the_shapes_of_the_checkpoint() -> None:
    """P8: a save refuses a tensor without a shape; a restore gives it shape and values, or leaves it lazy."""
    saved_norm, saved_linear = nn.LazyBatchNorm1d(), nn.Linear(2, 2)
    with pytest.raises(UnsupportedStateError, match="not initialised") as caught:
        capture({"linear": saved_linear, "norm": saved_norm})
    assert caught.value.key == "norm/weight"
    saved_norm(torch.randn(4, 2))
    saved = save({"linear": saved_linear, "norm": saved_norm})
    linear, norm = nn.Linear(2, 2), nn.LazyBatchNorm1d()
    before = linear.weight.detach().clone()
    for fails in ({"linear": linear, "norm": norm, "extra": 0}, {"norm": norm, "linear": nn.Linear(2, 3)}):
        with pytest.raises(StateMismatchError):
            restore(saved, fails)
        assert same_bits(linear.weight, before)
        assert {type(value) for value in (norm.weight, norm.running_mean)} == {
            nn.UninitializedParameter,
            nn.UninitializedBuffer,
        }
    restore(saved, {"linear": linear, "norm": norm})
    same_module(saved_linear, linear)
    same_module(saved_norm, norm)
    batch = torch.randn(4, 2)
    assert same_bits(norm(batch), saved_norm(batch))
    same_module(saved_norm, norm)


def test_every_difference_is_listed_and_nothing_is_touched() -> None:
    """P50: missing, unexpected, another shape (also one that would broadcast) and another dtype, all in one error."""
    saved = save({"model": Holder(same=torch.ones(2), shape=torch.ones(3), dtype=torch.ones(2), gone=torch.ones(1))})
    fresh = Holder(same=torch.zeros(2), shape=torch.zeros(2, 3), dtype=torch.zeros(2).half(), new=torch.zeros(1))
    with pytest.raises(StateMismatchError) as caught:
        restore(saved, {"model": fresh, "extra": 0})
    error = caught.value
    assert error.missing == ("extra", "model/new")
    assert error.unexpected == ("model/gone",)
    assert error.different == (
        "model/shape (float32[2, 3] here, float32[3] in the checkpoint)",
        "model/dtype (float16[2] here, float32[2] in the checkpoint)",
    )
    assert all(t.eq(0).all() for t in fresh.buffers())


def test_a_tree_that_names_an_absent_tensor_is_damaged() -> None:
    """P47: a tensor that the index lacks is an error of the checkpoint, before anything is touched."""
    saved = save({"model": nn.Linear(2, 2)})
    stored = {key: how for key, how in saved.stored.items() if key != "model/bias"}
    with pytest.raises(IntegrityError, match="model/bias"):
        plan_restore({"model": nn.Linear(2, 2)}, saved.groups, stored)
