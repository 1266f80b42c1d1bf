"""A save and a restore without files: the tensors are cloned, the trees go through JSON."""

from __future__ import annotations

import io
import json
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import HashStore, destroy_process_group, init_process_group  # type: ignore[attr-defined]

from ckpt_tasks.format.tree import decode, encode
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.kinds.group_parts import GroupState
from ckpt_tasks.state.restoring import plan_restore
from ckpt_tasks.state.tensors.tensor_sources import HeldTensors
from ckpt_tasks.state.tensors.tensors import DTYPES, same_bits


class Holder(nn.Module):
    """A module with the given tensors as buffers."""

    def __init__(self, **buffers: torch.Tensor):
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)


@dataclass(frozen=True)
class Saved:
    """A state as a checkpoint has it: the bytes of its trees, and dense copies of its tensors."""

    manifest: str
    tensors: dict[str, torch.Tensor]

    @property
    def groups(self) -> dict[str, GroupState]:
        groups = json.loads(self.manifest)
        return {name: GroupState(group["kind"], decode(group["tree"])) for name, group in groups.items()}

    @property
    def stored(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {key: (DTYPES[t.dtype], tuple(t.shape)) for key, t in self.tensors.items()}


def save(state: Mapping[str, Any], *, rng: bool = True) -> Saved:
    captured = capture(state, rng=rng)
    groups = {name: {"kind": g.kind, "tree": encode(g.tree, name)} for name, g in captured.groups.items()}
    tensors = {key: t.clone(memory_format=torch.contiguous_format) for key, t in captured.tensors.items()}
    return Saved(json.dumps(groups), tensors)


def restore(saved: Saved, state: Mapping[str, Any], *, partial: bool = False, rng: bool = True) -> frozenset[str]:
    """Restore through a staging area that is overwritten afterwards, as the next save does; return the keys used."""
    plan = plan_restore(state, saved.groups, saved.stored, partial=partial, rng=rng)
    staging = {key: saved.tensors[key].clone() for key in plan.keys}
    plan.apply(HeldTensors(staging))
    for tensor in staging.values():
        tensor.reshape(-1).view(torch.uint8).fill_(0xA5)
    return plan.keys


def trip(value: Any, fresh: Any = None) -> Any:
    """Save a value as the only group of a state and return what a restore makes of `fresh`."""
    saved, state = save({"it": value}, rng=False), {"it": fresh}
    restore(saved, state, rng=False)
    return state["it"]


def assert_same(one: Any, other: Any, path: str = "it") -> None:
    """Compare type by type and bit by bit."""
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor) and (one.layout is not torch.strided or one.is_quantized):
        assert _described(one) == _described(other), path
    elif isinstance(one, torch.Tensor):
        assert same_bits(one, other), path
        assert one.requires_grad == other.requires_grad, path
    elif isinstance(one, dict):
        assert [*one] == [*other], path
        assert getattr(one, "default_factory", None) is getattr(other, "default_factory", None), path
        assert [type(key) for key in one] == [type(key) for key in other], path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple, deque)):
        assert len(one) == len(other), path
        assert not isinstance(one, deque) or one.maxlen == other.maxlen, path
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}/{n}")
    elif isinstance(one, io.BytesIO):
        assert (one.getvalue(), one.tell()) == (other.getvalue(), other.tell()), path
    elif hasattr(one, "tobytes"):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), path
    else:
        same = one == other if isinstance(one, (set, frozenset)) else repr(one) == repr(other)
        assert same, path  # by repr: NaN equals itself, and 0.0 is not -0.0


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    is_coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
    return tensor.layout, is_coalesced, tensor.dtype, tensor.shape, repr(tensor)


def same_module(one: nn.Module, other: nn.Module) -> None:
    assert_same(dict(one.state_dict()), dict(other.state_dict()))


@contextmanager
def one_rank() -> Iterator[None]:
    """Run a body as rank 0 of 1, without a socket."""
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        destroy_process_group()


class Meter:
    """A metric accumulator, and an early stopping that counts its patience; its restore raises `fails` times."""

    def __init__(self, **values: Any):
        self.values = values
        self.fails = 0

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state
        if self.fails:
            self.fails -= 1
            raise ValueError("no such state")


def everything(seed: int) -> dict[str, Any]:
    """Return a state with one group of every kind, its values depending on the seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return {
        "plain": {"history": [seed, torch.full((2,), float(seed))]},
        "first": Meter(n=seed, t=torch.full((2,), float(seed))),
        "model": model,
        "second": Meter(n=seed, t=torch.full((3,), float(seed))),
        "optimizer": optimizer,
        "generator": torch.Generator().manual_seed(seed),
        "table": np.full(3, float(seed)),
        "third": Meter(n=seed),
        "step": seed,
    }


def fingerprint(state: Mapping[str, Any]) -> tuple[str, list[bytes]]:
    """Return every bit of a state, the random streams too."""
    saved = save(state)
    return saved.manifest, [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in saved.tensors.values()]
