"""Every placement of a tensor on four ranks is saved, and restored to every other one, by DCP and by a Checkpointer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.dcp import CkptReader, CkptWriter
from tests.support.gang import Gang, distributed

Placement = tuple[tuple[int, ...], tuple[Any, ...]] | None  # a mesh and how it cuts, None: a plain tensor
_KINDS = (Replicate(), Shard(0), Shard(1))
PLACEMENTS: Sequence[Placement] = [
    *(((4,), (one,)) for one in _KINDS),
    *((mesh, (one, other)) for mesh in ((2, 2), (1, 4)) for one in _KINDS for other in _KINDS),
    *(((2, 2), (_StridedShard(dim, split_factor=2), Shard(dim))) for dim in (0, 1)),
    None,
]


def is_strided(placement: Placement) -> bool:
    return placement is not None and type(placement[1][0]) is _StridedShard


def whole(number: int, *, even: bool) -> torch.Tensor:
    """Return a tensor that has this placement."""
    shape = (8, 12) if even else (9, 10)
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + number


@cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def placed(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    if placement is None:
        return tensor.clone()
    mesh, cuts = placement
    here = mesh_of(mesh)
    if type(cuts[0]) is not _StridedShard:
        return distributed(tensor, here, cuts)
    dim = cuts[1].dim  # first tensor parallelism over the second dimension, then FSDP over the first
    outer, inner = here.get_local_rank(0), here.get_local_rank(1)
    local = tensor.chunk(2, dim)[inner].chunk(2, dim)[outer].contiguous()
    return DTensor.from_local(local, here, cuts, run_check=False, shape=tensor.shape, stride=tensor.stride())


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensors(at: int | None = None, *, zeros: bool = False) -> nn.Module:
    """Return a tensor of each placement, and an uneven one; all in placement `at`, if there is one.

    torch itself loses rows of uneven parts that are strided (tests/checkpoint/ranks/test_uneven.py): they are left out.
    """
    held = nn.Module()
    for number, own in enumerate(PLACEMENTS):
        placement = own if at is None else PLACEMENTS[at]
        for even in (True, False):
            if even or not (is_strided(own) or is_strided(placement)):
                tensor = placed(whole(number, even=even) * (not zeros), placement)
                held.register_parameter(f"{'even' if even else 'odd'}{number}", nn.Parameter(tensor))
    return held


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    there = dict(other.named_parameters())
    return [name for name, tensor in one.named_parameters() if not torch.equal(local(tensor), local(there[name]))]


def every_pair(rank: int, size: int, root: str) -> tuple[int, list[str]]:
    """Save each placement and restore it to every other one, by DCP and by a Checkpointer; say what differs."""
    warnings.simplefilter("ignore")  # DCP's
    state = tensors()
    save({"t": state}, storage_writer=CkptWriter(f"{root}/dcp", step=1))
    with Checkpointer(CheckpointConfig(checkpoint_dir=f"{root}/ours")) as ckpt:
        ckpt.save(1, {"t": state})
    pairs, wrong = 0, []
    for at in range(len(PLACEMENTS)):
        wanted = tensors(at)
        pairs += sum(name.startswith("even") for name, _ in wanted.named_parameters())
        for place in ("dcp", "ours"):
            into = tensors(at, zeros=True)
            load({"t": into}, storage_reader=CkptReader(f"{root}/{place}"))
            wrong += [f"{place} {name} → {at} by DCP" for name in differing(wanted, into)]
            into = tensors(at, zeros=True)
            saved = open_run(f"{root}/{place}")
            saved.restore(saved.find("latest"), {"t": into}, only=[f"t/{name}" for name, _ in into.named_parameters()])
            wrong += [f"{place} {name} → {at} by a Checkpointer" for name in differing(wanted, into)]
    return pairs, wrong


@pytest.mark.slow
def test_every_pair_of_placements(tmp_path: Path) -> None:
    """24 × 24 pairs on four ranks, saved by DCP or by a Checkpointer and restored by either, are equal bit for bit."""
    with Gang(4, every_pair, str(tmp_path)) as gang:
        assert gang.results(timeout_s=600) == [(576, [])] * 4
