"""Modules: captured whole, restored bit by bit into their own memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks.errors import StateMismatchError, UnsupportedStateError
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.tensors.tensors import DTYPES, same_bits
from tests.support.roundtrip import Holder, assert_same, one_rank, restore, same_module, save


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def bits_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random bits as a tensor of any dtype."""
    size = max(1, torch.empty(shape).numel()) * 16
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    values = raw.view(dtype).flatten()
    return values[: torch.empty(shape).numel()].reshape(shape).clone()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit(dtype: torch.dtype) -> None:
    """P6: every dtype, also of rank 0 and without elements, dense, transposed and sliced, keeps every bit."""
    values = {f"dense{n}": bits_of(dtype, shape) for n, shape in enumerate([(), (5,), (3, 4), (0,), (3, 0, 2)])}
    buffers = {**values, "transposed": bits_of(dtype, (3, 4)).T, "sliced": bits_of(dtype, (6, 8))[1::2, ::3]}
    module = Holder(**buffers)
    fresh = Holder(**{name: bits_of(dtype, tuple(t.shape)) for name, t in buffers.items()})
    restore(save({"model": module}), {"model": fresh})
    same_module(module, fresh)


def test_tied_weights_are_stored_once_and_come_back_tied() -> None:
    """P4: one tensor in the checkpoint, one storage after the restore, and both names have the values."""
    module, fresh = Tied(), Tied()
    saved = save({"model": module}, rng=False)
    assert [*saved.tensors] == ["model/embed.weight"]
    restore(saved, {"model": fresh}, rng=False)
    assert fresh.head.weight is fresh.embed.weight
    assert same_bits(fresh.head.weight, module.embed.weight)


def test_a_tie_that_only_one_side_has_is_refused() -> None:
    """P4: tied weights do not come apart silently, and two different ones are not squeezed into one."""
    tied, apart = Tied(), Tied(tie=False)
    with pytest.raises(StateMismatchError, match=r"model/head\.weight \(tied in the checkpoint"):
        restore(save({"model": tied}), {"model": apart})
    before = tied.embed.weight.clone()
    with pytest.raises(StateMismatchError, match=r"tied to model/embed\.weight here"):
        restore(save({"model": apart}), {"model": tied})
    assert same_bits(tied.embed.weight, before)


def test_views_keep_values_and_take_no_more_than_their_bytes() -> None:
    """P5: slices, overlapping, expanded, transposed and channels_last tensors; no more than is seen is stored."""

    def build(make: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, nn.Module]:
        base, images = make(1000), make(2, 3, 4, 5).to(memory_format=torch.channels_last)
        parts = {"slice": base[10:12], "left": base[100:110], "overlapping": base[105:115], "images": images}
        views = {"expanded": make(1, 4).expand(3, 4), "windows": make(8).unfold(0, 3, 1), "transposed": make(3, 5).T}
        return base, Holder(**parts, **views)

    (_, module), (other, fresh) = build(torch.randn), build(torch.zeros)
    captured = capture({"model": module}, rng=False)
    sizes = {f"model/{name}": value.numel() for name, value in module.named_buffers()}
    assert {key: value.numel() for key, value in captured.tensors.items()} == sizes
    strides = {name: t.stride() for name, t in fresh.named_buffers()}
    restore(save({"model": module}), {"model": fresh})
    same_module(module, fresh)
    assert {name: t.stride() for name, t in fresh.named_buffers()} == strides
    assert other[:10].eq(0).all()
    assert other[115:].eq(0).all()


def test_what_a_state_dict_leaves_out_is_left_alone() -> None:
    """P8: a buffer that is not persistent is neither stored nor touched, and the requires_grad flags are not either."""

    def build(value: float) -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("scratch", torch.full((2,), value), persistent=False)
        return module

    module, fresh = build(1.0), build(2.0)
    fresh.get_parameter("weight").requires_grad_(False)
    restore(save({"model": module}), {"model": fresh})
    same_module(module, fresh)
    assert fresh.get_buffer("scratch").eq(2.0).all()
    assert not fresh.get_parameter("weight").requires_grad


class WithExtra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [{"calls": 0, "seen": [1, (2,)]}, torch.arange(5), {"t": torch.ones(2, 3).T}])
def test_extra_state_comes_back(extra: Any) -> None:
    """P8: what get_extra_state returns reaches set_extra_state, tensors of its own, whatever shape was there before."""
    module, fresh = WithExtra(extra), WithExtra(torch.zeros(1))
    restore(save({"model": module}), {"model": fresh})
    same_module(module.layer, fresh.layer)
    assert_same(extra, fresh.extra)


def test_a_module_with_its_own_way_to_restore_is_asked() -> None:
    """P8: hooks and overridden methods of a module take part in its restore."""
    seen: list[str] = []

    class Own(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, how: Any, *rest: Any) -> None:
            seen.append(f"method {how['version']}")
            super()._load_from_state_dict(state_dict, prefix, how, *rest)

    module, fresh = nn.Sequential(Own(2, 2)), nn.Sequential(Own(2, 2))
    restore(save({"model": module}), {"model": fresh})
    same_module(module, fresh)
    hooked = nn.Linear(2, 2)
    hooked.register_load_state_dict_post_hook(lambda *_: seen.append("hook"))  # type: ignore[no-untyped-call]
    plain = nn.Linear(2, 2)
    restore(save({"model": plain}), {"model": hooked})
    same_module(plain, hooked)
    assert seen == ["method 3", "hook"]


_WRAPS: dict[str, Any] = {
    "dp": nn.DataParallel,
    "ddp": nn.parallel.DistributedDataParallel,
    "compile": lambda m: torch.compile(m, backend="eager"),
    "script": torch.jit.script,
}


@pytest.mark.parametrize("wrap", _WRAPS)
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_a_wrapper_leaves_no_trace(wrap: str, wrapped_first: bool) -> None:
    """P10: saved wrapped and restored bare, and the reverse; the optimizer's names are the same too."""

    def build(wrapped: bool) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
        return {"model": _WRAPS[wrap](model) if wrapped else model, "optimizer": optimizer}

    with one_rank():
        one, other = build(wrapped_first), build(not wrapped_first)
        saved = save(one)
        assert {"model/0.weight", "model/1.running_mean"} < {*saved.tensors}
        restore(saved, other)
        assert save(other).manifest == saved.manifest
        assert_same(save(other).tensors, saved.tensors)


def test_a_compiled_submodule_leaves_no_trace() -> None:
    """P10: `_orig_mod.` inside of a name is left out as well, and found again on the way back."""
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    inner = nn.Sequential(nn.Linear(2, 2), compiled)
    bare = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    saved = save({"model": inner}, rng=False)
    assert {*saved.tensors} == {f"model/{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")}
    restore(saved, {"model": bare}, rng=False)
    restore(save({"model": bare}, rng=False), {"model": inner}, rng=False)
    assert all(same_bits(a, b) for a, b in zip(inner.parameters(), bare.parameters(), strict=True))


def test_two_names_that_become_one_are_refused() -> None:
    """P10: leaving out `_orig_mod.` never makes one tensor stand for two."""
    holder = nn.ModuleDict({"a": nn.ModuleDict({"_orig_mod": nn.Linear(1, 1, bias=False)})})
    holder["a"].register_buffer("weight", torch.ones(1))
    with pytest.raises(UnsupportedStateError, match="one name without the wrappers"):
        capture({"model": holder})
