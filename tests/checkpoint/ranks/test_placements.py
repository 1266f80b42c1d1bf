"""Where every rank's part of a tensor lies: for all meshes, placements and shapes, mostly without processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, event, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.state.tensors.placements import World, place_of
from ckpt_tasks.state.tensors.tensors import TensorSet
from tests.checkpoint.ranks.training import config
from tests.support.gang import distributed, run
from tests.support.sweeps import sparse

Placement = Replicate | Shard | _StridedShard
NAMES = ("dp_replicate", "dp_shard", "tp")


class Layout(NamedTuple):
    """A mesh, which of its dimensions a tensor lies on, and how they cut it."""

    mesh: tuple[int, ...]
    dims: tuple[int, ...]
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    flattened: bool = False


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw what torch can make: cuts from left to right, or a pair that FSDP made over tensor parallelism."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) <= 24)))
    dims = draw(st.lists(st.sampled_from(range(len(mesh))), min_size=1, unique=True).map(sorted))
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    placements = [draw(st.sampled_from(kinds)) for _ in dims]
    cuts = [(n, one.dim) for n, one in enumerate(placements) if isinstance(one, Shard)]
    if len(cuts) > 1 and draw(st.booleans()):
        (outer, dim), (inner, _) = cuts[-2:]
        placements[outer] = _StridedShard(dim, split_factor=mesh[dims[inner]])
        placements[inner] = Shard(dim)
        for n, _ in cuts[:-2]:
            placements[n] = Replicate()
    return Layout(mesh, tuple(dims), tuple(placements), shape)


@contextmanager
def fake_rank(rank: int, size: int) -> Iterator[None]:
    """Be one rank of a process group that has no other."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(layout: Layout) -> DeviceMesh:
    mesh = init_device_mesh("cpu", layout.mesh, mesh_dim_names=NAMES[: len(layout.mesh)])
    return mesh if len(layout.dims) == len(layout.mesh) else mesh[tuple(NAMES[n] for n in layout.dims)]


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """Cut a tensor as torch does, by `torch.chunk`; FSDP cuts last what it marks by a _StridedShard."""
    at = mesh.get_coordinate()
    assert at is not None
    order = sorted(range(len(placements)), key=lambda n: isinstance(placements[n], _StridedShard))
    for n in order:
        placement = placements[n]
        if not isinstance(placement, Replicate):
            pieces = whole.chunk(mesh.shape[n], placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = [*pieces, *[empty] * (mesh.shape[n] - len(pieces))][at[n]]
    return whole


def taken(tensor: torch.Tensor, world: World) -> tuple[torch.Tensor, tuple[slice, ...]] | None:
    """Return what this rank writes of a tensor, and where that lies; None where it writes nothing."""
    tensors = TensorSet(world)
    tensors.add(tensor, "group/name", exact=False)
    if not tensors.tensors:
        return None
    [(key, part)] = tensors.tensors.items()
    full_shape, offset = tensors.places.get(key, (tuple(tensor.shape), (0,) * tensor.dim()))
    assert full_shape == tuple(tensor.shape)
    return part, tuple(slice(begin, begin + extent) for begin, extent in zip(offset, part.shape, strict=True))


def check(layout: Layout, *, by_torch: bool) -> None:
    """Take a tensor on every rank in turn: the parts are what they say, and cover every element once."""
    whole = torch.arange(int(np.prod(layout.shape))).reshape(layout.shape)
    written = np.zeros(layout.shape, int)
    size = int(np.prod(layout.mesh))
    rows = 0
    for rank in range(size):
        with fake_rank(rank, size):
            mesh = mesh_of(layout)
            if by_torch:
                tensor = distributed(whole, mesh, layout.placements)
            else:
                local = cut(whole, mesh, layout.placements)
                tensor = DTensor.from_local(
                    local, mesh, layout.placements, run_check=False, shape=whole.shape, stride=whole.stride()
                )
            found = taken(tensor, World(rank, size))
        if found is not None:
            part, where = found
            assert torch.equal(part, whole[where])
            written[where] += 1
            rows += 1
    assert (written == 1).all()
    assert rows == 1 or 0 not in layout.shape


@given(layouts())
def test_parts_cover_every_tensor_once(layout: Layout) -> None:
    """P58: with any mesh, submesh, placements and shape the ranks' parts are a tiling, and hold what they say."""
    event(f"strided {any(isinstance(one, _StridedShard) for one in layout.placements)}")
    check(layout, by_torch=False)


@given(layouts())
def test_what_torch_distributes_is_placed_or_refused(layout: Layout) -> None:
    """P38: torch's own parts are placed where torch took them from; one whose place is unknown is refused."""
    assume(layout.shape)
    if any(isinstance(one, _StridedShard) for one in layout.placements):
        with suppress(UnsupportedStateError):
            check(layout, by_torch=True)
    else:
        check(layout, by_torch=True)


def test_a_large_replica_is_divided() -> None:
    """Every replica writes an equal part of a large tensor, over the dimensions of the mesh that do not cut it."""
    for rank, (dims, names) in itertools.product(range(8), (((0,), ("dp_shard",)), ((0, 1), ("dp_shard", "tp")))):
        with fake_rank(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)[names]
            placements = [Shard(0), Replicate()][: len(dims)]
            tensor: Any = distributed(torch.zeros(256, 1024), mesh, placements)
            found = taken(tensor, World(rank, 8))
            assert found is not None
            assert found[0].numel() == 256 * 1024 / 8


def test_a_flattened_dimension_of_the_mesh_is_not_a_replica() -> None:
    """Dimensions that were joined under a name of their own cut the tensor as if they were one."""
    written = np.zeros(16, int)
    for rank in range(8):
        with fake_rank(rank, 8):
            root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
            joined = root["dp_replicate", "dp_shard"]._flatten("every_dp")
            tensor = distributed(torch.arange(16), joined, [Shard(0)])
            found = taken(tensor, World(rank, 8))
            if found is not None:
                written[found[1]] += 1
    assert (written == 1).all()


def test_an_order_of_cuts_that_is_unknown_is_refused() -> None:
    """P7: a _StridedShard whose split factor does not say what cut before it is refused by its key."""
    with fake_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        placements = [_StridedShard(0, split_factor=4), Shard(0)]
        tensor = DTensor.from_local(
            torch.zeros(2), mesh, placements, run_check=False, shape=torch.Size([8]), stride=(1,)
        )
        with pytest.raises(UnsupportedStateError, match="unknown order") as caught:
            taken(tensor, World(0, 4))
    assert caught.value.key == "group/name"


def test_a_mesh_that_lists_some_of_its_ranks_backwards_is_refused() -> None:
    """P58: a mesh may list a dimension backwards, but not in a part of another one: torch mixes such parts up."""
    cube = np.arange(8).reshape(2, 2, 2)
    for ranks, (n, m) in itertools.product((cube, cube.T), itertools.permutations(range(3), 2)):
        backwards = np.flip(ranks, n)
        for order, refused in ((backwards, False), (np.where(np.indices((2, 2, 2))[m], backwards, ranks), True)):
            with fake_rank(0, 8), pytest.raises(UnsupportedStateError, match="order") if refused else nullcontext():
                mesh = DeviceMesh("cpu", order.tolist())
                place_of(DTensor.from_local(torch.zeros(1, 1, 1), mesh, [*map(Shard, range(3))]), "key", World(0, 8))


Order = list[int] | list[list[int]]
ORDERS: list[Order] = [*([*order] for size in (2, 3) for order in itertools.permutations(range(size)))]
ORDERS += [[[a, b], [c, d]] for a, b, c, d in itertools.permutations(range(4))]
QUICK: list[Order] = [[1, 0], [2, 0, 1], [[3, 1], [2, 0]], [[0, 3], [1, 2]]]


def whole_of(rows: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(rows * 12.0).reshape(rows, 12), "bias": torch.arange(float(rows))}


def is_regular(order: Order) -> bool:
    """Say whether the rows of a mesh, and its columns, list their ranks in one order."""
    places = [np.argsort(np.argsort(order, n), n) for n in range(np.ndim(order))]
    return len(places) == 1 or all(bool((of == of.take([0], 1 - n)).all()) for n, of in enumerate(places))


def on_mesh(order: Order) -> dict[str, tuple[torch.Tensor, DTensor]]:
    """Cut tensors over a mesh whose ranks are in this order, in every way of torch's; return each beside its whole."""
    names = ("dp", "tp")[: np.ndim(order)]
    mesh = DeviceMesh("cpu", order, mesh_dim_names=names)
    found: dict[str, tuple[torch.Tensor, Any]] = {}
    regular = is_regular(order)
    for rows in (12, 7) if regular else (12,):  # torch crashes if the parts that it mixes up have other shapes
        weight = whole_of(rows)["weight"]
        for placements in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=len(names)):
            found[f"{rows} {placements}"] = weight, distribute_tensor(weight, mesh, placements)
        for style in (None, *([ColwiseParallel(), RowwiseParallel()] if regular and len(names) > 1 else [])):
            model = nn.Sequential(nn.Linear(12, rows))
            model[0].load_state_dict(whole_of(rows))
            if style is not None:
                parallelize_module(model, mesh["tp"], {"0": style})
            fully_shard(model, mesh=mesh if style is None else mesh["dp"])
            for name, parameter in model[0].named_parameters():
                found[f"{rows} {type(style).__name__} {name}"] = whole_of(rows)[name], parameter.detach()
    return found


def save_on_mesh(rank: int, size: int, root: str, order: Order) -> dict[str, tuple[Any, bool, bool]]:
    """Save all that is not refused. Return each whole as torch gathers it here, whether it is right, and refused."""
    found = {}
    cut = on_mesh(order)
    for name, (whole, tensor) in cut.items():
        refused = False
        try:
            place_of(tensor, name, World(rank, size))
        except UnsupportedStateError as error:
            refused = "init_device_mesh" in str(error.hint)
        gathered = tensor.full_tensor()
        found[name] = gathered.numpy(), torch.equal(gathered, whole), refused
    of_all: list[Any] = [None] * size
    dist.all_gather_object(of_all, {name for name, (*_, refused) in found.items() if refused})
    with Checkpointer(config(root)) as ckpt:
        ckpt.save(1, {"cut": {name: tensor for name, (_, tensor) in cut.items() if name not in set().union(*of_all)}})
    return found


@pytest.mark.parametrize("order", sparse(ORDERS, 4, QUICK), ids=str)
def test_a_mesh_may_list_its_ranks_in_any_order(tmp_path: Path, order: Order) -> None:
    """P58: what is saved is what torch gathers; refused are rows that torch has lost, and meshes that mix parts up."""
    ranks = run(np.size(order), save_on_mesh, str(tmp_path), order)
    refused = {name for rank in ranks for name, (*_, refused) in rank.items() if refused}
    wrong = {name for rank in ranks for name, (_, right, _) in rank.items() if not right}
    state = {"cut": {name: torch.zeros(ranks[0][name][0].shape) for name in ranks[0].keys() - refused}}
    assert Checkpointer(config(str(tmp_path))).restore(state) == 1
    for name, tensor in state["cut"].items():
        assert np.array_equal(tensor.numpy(), ranks[0][name][0]), name
    if is_regular(order):
        assert refused <= wrong
        assert not {name for name in refused | wrong if name.startswith("12")}
    else:
        assert refused == {name for name in ranks[0] if "(Replicate(), Replicate())" not in name}
