"""placements.py: where a rank's part of a tensor lies, and which rank writes what, against torch's parts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckpt_tasks.format.layout.regions import Box
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.tensors.placements import Shares, World, is_sharded, local_of, place_of, share
from tests.support.gang import run

SHAPES = [(7,), (13, 5), (3, 4), (1, 9), (8, 8), (2, 3, 5), (5, 8000)]  # the last one is cut


def values(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(begin, begin + extent) for begin, extent in zip(*box, strict=True))]


def wrong_parts(rank: int, size: int, meshes: list[tuple[int, ...]]) -> list[str]:
    """Distribute tensors in every way; return those whose part is not what its place says, or its share another one."""
    wrong = []
    found = Shares(World(rank, size))
    for dims in meshes:
        mesh = init_device_mesh("cpu", dims, mesh_dim_names=tuple("abc"[: len(dims)]))
        for shape in SHAPES:
            whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
            choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
            for placements in itertools.product(choices, repeat=len(dims)):
                tensor = distribute_tensor(whole, mesh, placements)
                place = place_of(tensor, "key", World(rank, size))
                part = local_of(tensor)
                if part.numel() and not torch.equal(values(whole, place.box), part):
                    wrong.append(f"{dims} {shape} {placements}: {place}")
                for key in ("key", "another"):
                    box, (one, begin) = share(place, key, 8), found.of(tensor, part, key)
                    same = one is None if box is None else one and torch.equal(values(whole, box), one.of(part))
                    same = same and (
                        begin == place.box.offset if place.replicas > 1 and part.numel() else begin is None
                    )
                    if not same or (one and one.offset not in (None, box and box.offset)):
                        wrong.append(f"{dims} {shape} {placements}, {key}: {one} is not {box}")
    return wrong


@pytest.mark.parametrize(
    ("size", "meshes"), [(4, [(4,), (2, 2)]), pytest.param(6, [(6,), (2, 3), (3, 2)], marks=pytest.mark.slow)]
)
def test_every_part_lies_where_its_place_says(size: int, meshes: list[tuple[int, ...]]) -> None:
    """P7: of any shape, even or not, under any placements, the box has the values of the part; so has its share."""
    assert run(size, wrong_parts, meshes) == [[]] * size


def shares(rank: int, size: int, dims: tuple[int, int]) -> list[Any]:
    """Cut models by tensor parallelism and then by FSDP; return what each parameter's part and share is."""
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=("dp", "tp"))
    found = []
    for rows in (7, 13, 9, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, rows), nn.Linear(rows, 6))
        whole = [parameter.detach().clone() for parameter in model.parameters()]
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        for values_, parameter in zip(whole, model.parameters(), strict=True):
            place, part = place_of(parameter, "key", World(rank, size)), local_of(parameter.detach())
            same = not part.numel() or torch.equal(values(values_, place.box), part)
            found.append((tuple(parameter.shape), same, share(place, "key", 4)))
    return found


@pytest.mark.parametrize(("size", "dims"), [(4, (2, 2)), pytest.param(6, (3, 2), marks=pytest.mark.slow)])
def test_fsdp_over_tensor_parallelism_is_cut_from_right_to_left(size: int, dims: tuple[int, int]) -> None:
    """P7: uneven shards of both (pytorch issue 161368): parts are right, and shares cover each element once."""
    by_rank = run(size, shares, dims)
    assert len(by_rank[0]) == 4 * 4
    for number, (shape, _, _) in enumerate(by_rank[0]):
        covered = torch.zeros(shape)
        for found in by_rank:
            _, same, box = found[number]
            assert same
            if box is not None:
                values(covered, box).add_(1)
        assert bool((covered == 1).all())


def test_replicas_divide_large_boxes_and_deal_small_ones() -> None:
    """Of three replicas each writes a third of a large box, and one of them all of a small one."""
    from ckpt_tasks.state.tensors.placements import Place

    large, small = Box((0, 0), (1000, 200)), Box((0, 0), (10, 20))
    for box, many in ((large, 3), (small, 1)):
        found = [share(Place(box.shape, box, replica, 3), "key", 4) for replica in range(3)]
        boxes = [part for part in found if part is not None]
        assert len(boxes) == many
        assert sum(part.size for part in boxes) == box.size


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """List the operators that are called on DTensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_sharded, tree_leaves((arguments, options)))):
            self.called.append(str(function))
        return function(*arguments, **(options or {}))


def walked(rank: int, size: int) -> tuple[int, list[str]]:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    with Operators() as operators:
        captured = capture({"model": model, "optimizer": optimizer}, world=World(rank, size))
    return len(captured.tensors), operators.called


def test_a_walk_calls_no_operator_of_a_dtensor() -> None:
    """Training waits for the walk through a sharded state, and one operator of a DTensor takes longer than all else."""
    for count, called in run(2, walked):
        assert count > 12  # shards of four parameters and their moments
        assert called == []
