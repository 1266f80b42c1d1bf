"""The part of a whole tensor that this rank holds. Only this module knows how a DTensor is cut.

A rank's part is a box. If several mesh dimensions cut one dimension, they cut it from left to right, by torch's rule:
parts of equal extent, the last parts shorter or empty. The part of a rank depends on its number in the process group of
the mesh dimension, where torch sorts the ranks; the mesh may list them in another order. If FSDP cuts a tensor that
tensor parallelism has cut before, torch marks it by a `_StridedShard`, and the cuts go from right to left. For such
tensors torch's own offset is wrong with uneven shards (github.com/pytorch/pytorch issue 161368). So this module
computes the box, compares it with the extent of the part, and raises if they differ.

Ranks that hold the same box are its *replicas*; they divide its bytes among themselves.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.format.layout.regions import Box

_ORDER = "If the mesh names its ranks in another order than ascending, make it with init_device_mesh."
_CUT_BYTES = 1 << 18  # One rank writes a smaller replicated box; replicas divide a larger one.


class World(NamedTuple):
    """This rank's number, and the number of ranks."""

    rank: int
    size: int


ALONE = World(0, 1)


class Place(NamedTuple):
    """A whole tensor's shape, this rank's box in it, this rank's number among the box's replicas, and their number.

    A rank outside the tensor's mesh has an empty box, and `replicas` is 0.
    """

    full_shape: tuple[int, ...]
    box: Box
    replica: int
    replicas: int


class Share(NamedTuple):
    """The part that this rank writes of a tensor of `full_shape`, at `offset` (None: the whole tensor).

    `cut` is a range (axis, begin, extent) of the part that the rank holds; None if the rank writes all of that part.
    """

    full_shape: tuple[int, ...]
    offset: tuple[int, ...] | None
    cut: tuple[int, int, int] | None

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return this share of the rank's part, as a view."""
        if 0 in self.full_shape:  # A part of an empty tensor may have another shape.
            return local.new_empty(self.full_shape)
        return local if self.cut is None else local.narrow(*self.cut)


class _Alike(NamedTuple):
    """The facts for all tensors of one placement: a share, a box that one replica writes (by key), a part's offset."""

    share: Share | None
    dealt: Place | None
    begin: tuple[int, ...] | None


class Shares:
    """This rank's shares of tensors, computed once for all tensors with the same placement."""

    def __init__(self, world: World):
        self._world = world
        self._shares: dict[Any, _Alike] = {}

    def of(self, tensor: torch.Tensor, local: torch.Tensor, key: str) -> tuple[Share | None, tuple[int, ...] | None]:
        """Return this rank's share of a tensor (`local`: the part that it holds); None if the rank writes nothing.

        Also return the offset of `local` if other ranks hold the same part, else None. Raises UnsupportedStateError
        with the key if the position of the part cannot be proved.
        """
        alike: Any = (tensor.shape, tensor.dtype)
        if local is not tensor:
            alike = (*alike, tensor.device_mesh, tensor.placements, local.shape)  # type: ignore[attr-defined]
        shared = self._shares.get(alike)
        if shared is None:
            shared = self._shares[alike] = _shared(place_of(tensor, key, self._world), tensor.dtype.itemsize)
        share, dealt, begin = shared
        return share if dealt is None or _is_dealt(key, dealt) else None, begin


def is_sharded(value: Any) -> bool:
    """Return True if a value is a DTensor; import nothing."""
    kind = type(value)
    if kind is torch.Tensor or kind is nn.Parameter:
        return False  # Return fast for up to 10⁵ plain tensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; return any other tensor unchanged."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def place_of(tensor: torch.Tensor, key: str, world: World) -> Place:
    """Return the place of this rank's part in a tensor. Every rank of the world holds a whole copy of a plain tensor.

    Raises UnsupportedStateError with the key if the position cannot be proved.
    """
    shape = tuple(tensor.shape)
    if not is_sharded(tensor) or 0 in shape:
        return Place(shape, Box((0,) * len(shape), shape), world.rank, world.size)
    local, mesh = tuple(tensor._local_tensor.shape), tensor.device_mesh  # type: ignore[attr-defined]
    coordinate, placements = mesh.get_coordinate(), tuple(tensor.placements)  # type: ignore[attr-defined]
    # These values complete the cache's key: equal meshes can differ in the rank and in the coordinate.
    own = mesh.get_rank(), None if coordinate is None else tuple(coordinate)
    try:
        return _place_in(mesh, own, placements, shape, local)
    except UnsupportedStateError as error:
        error.key = key
        raise


@lru_cache(maxsize=1024)  # A model's tensors have few shapes, and a restore needs each place several times.
def _place_in(
    mesh: Any,
    own: tuple[int, tuple[int, ...] | None],
    placements: tuple[Any, ...],
    shape: tuple[int, ...],
    local: tuple[int, ...],
) -> Place:
    rank, coordinate = own
    if coordinate is None:
        return Place(shape, Box((0,) * len(shape), (0,) * len(shape)), 0, 0)
    if not (_is_regular(mesh) or all(placement.is_replicate() for placement in placements)):
        why = f"a tensor on a mesh of ranks in the order {mesh.mesh.tolist()} cannot be stored"
        raise UnsupportedStateError(f"{why}: torch mixes its parts up", hint=_ORDER)
    offset, extent = [0] * len(shape), [*shape]
    for dim in range(len(shape)):
        for mesh_dim in _order_of_cuts(placements, mesh.shape, dim):
            chunk = -(-extent[dim] // mesh.shape[mesh_dim])
            begin = min(extent[dim], mesh.get_local_rank(mesh_dim) * chunk)
            offset[dim] += begin
            extent[dim] = min(chunk, extent[dim] - begin)
    if local != tuple(extent) and math.prod(local) + math.prod(extent):  # torch gives an empty part many shapes.
        why = f"a tensor whose part has the shape {local} where its placements {placements} say {tuple(extent)}"
        raise UnsupportedStateError(f"{why} cannot be stored", hint=_ORDER)
    return Place(shape, Box(tuple(offset), tuple(extent)), *_replica(mesh, rank, placements, coordinate))


@lru_cache(maxsize=64)
def _is_regular(mesh: Any) -> bool:
    """Return True if torch's groups have their ranks in one order along each mesh dimension.

    Torch sorts the ranks of a process group. A rank's place in it must follow from the rank's coordinate alone.
    """
    for n, m in permutations(range(mesh.ndim), 2):
        order = mesh.mesh.argsort(n)
        if bool((order != order.narrow(m, 0, 1)).any()):
            return False
    return True


def share(place: Place, key: str, itemsize: int) -> Box | None:
    """Return the part of a box that this replica writes; None if it writes nothing.

    The replicas divide a large box; one replica, which the key chooses, writes a small box.
    """
    box, dealt = _divided(place, itemsize)
    return None if dealt and not _is_dealt(key, place) else box


def _divided(place: Place, itemsize: int) -> tuple[Box | None, bool]:
    """Return (this replica's part, False) if replicas divide a box; (the whole box, True) if one replica writes it."""
    offset, shape = place.box
    replica, replicas = place.replica, place.replicas
    if not replicas or (0 in shape and 0 not in place.full_shape):
        return None, False  # The rank is outside the mesh, or its shard is empty.
    if replicas == 1:
        return place.box, False
    axis = next((axis for axis, extent in enumerate(shape) if extent >= replicas), None)
    if axis is None or math.prod(shape) * itemsize < _CUT_BYTES:
        return place.box, True
    begin, end = (shape[axis] * n // replicas for n in (replica, replica + 1))
    at, extent = [*offset], [*shape]
    at[axis], extent[axis] = offset[axis] + begin, end - begin
    return Box(tuple(at), tuple(extent)), False


def _is_dealt(key: str, place: Place) -> bool:
    return zlib.crc32(key.encode()) % place.replicas == place.replica


def _shared(place: Place, itemsize: int) -> _Alike:
    box, dealt = _divided(place, itemsize)
    if box is None:
        return _Alike(None, None, None)
    held, cut = place.box, None
    for axis, extent in enumerate(box.shape):
        if extent != held.shape[axis]:
            cut = axis, box.offset[axis] - held.offset[axis], extent
    offset = box.offset if box.shape != place.full_shape else None
    begin = held.offset if place.replicas > 1 and 0 not in held.shape else None
    return _Alike(Share(place.full_shape, offset, cut), place if dealt else None, begin)


def like(local: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Make a DTensor from a new local part, with the mesh, placements and shape of `model`."""
    from torch.distributed.tensor import DTensor

    assert isinstance(model, DTensor)
    return DTensor.from_local(
        local, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


def cut_like(whole: torch.Tensor, model: torch.Tensor, key: str) -> torch.Tensor:
    """Return a whole tensor as `model` is cut: this rank's part of it, as a DTensor, if `model` is one."""
    if not is_sharded(model) or is_sharded(whole):
        return whole
    offset, shape = place_of(model, key, ALONE).box
    part = whole[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))]
    return like(part.to(local_of(model).device).contiguous(), model)


def reshard(modules: Iterable[nn.Module]) -> None:
    """Reshard the parameters of FSDP modules, so that each rank again holds only its shard, as between steps."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in modules:
        for inner in module.modules():
            if isinstance(inner, fsdp.FSDPModule):
                inner.reshard()


def cut_beside_data(module: nn.Module, ranks: int) -> str | None:
    """Name a parameter that not only data parallelism cuts, or None; also None if data parallelism spans all `ranks`.

    Considers only parameters of fully_shard and of parallelize_module.
    """
    fsdp, cut, degree = sys.modules.get("torch.distributed.fsdp"), None, 1
    of_fsdp, of_plan = set[int](), set[int]()
    for inner in module.modules():
        if isinstance(inner, nn.parallel.DistributedDataParallel):
            degree = max(degree, inner.process_group.size())
        if fsdp is not None and isinstance(inner, fsdp.FSDPModule):
            of_fsdp.update(map(id, inner.parameters()))
        if getattr(inner, "_distribute_module_applied", False):
            of_plan.update(map(id, inner.parameters()))
    for name, parameter in module.named_parameters():
        if is_sharded(parameter) and id(parameter) in of_fsdp | of_plan:
            shape, placements = parameter.device_mesh.shape, parameter.placements  # type: ignore[attr-defined]
            # fully_shard uses the first mesh dimension; the first two if the first replicates.
            data = 1 + placements[0].is_replicate() if id(parameter) in of_fsdp else 0
            degree = max(degree, math.prod(shape[:data]))
            if math.prod(shape[data:]) > 1 and (data or not all(one.is_replicate() for one in placements)):
                cut = cut or name
    return cut if degree < ranks else None


def _order_of_cuts(placements: Sequence[Any], sizes: Sequence[int], dim: int) -> list[int]:
    """List the mesh dimensions that cut a tensor's dimension, in the order of the cuts.

    Raises UnsupportedStateError if the order is unknown.
    """
    for placement in placements:
        if not (placement.is_replicate() or placement.is_shard() or _is_strided(placement)):
            raise UnsupportedStateError(
                f"a tensor with the placement {placement} cannot be stored",
                hint="Reduce it first: redistribute() it to Replicate() or Shard().",
            )
    cuts = [n for n, placement in enumerate(placements) if not placement.is_replicate() and placement.dim == dim]
    if not any(_is_strided(placements[n]) for n in cuts):
        return cuts
    before = 1
    for n in reversed(cuts):
        if (placements[n].split_factor if _is_strided(placements[n]) else 1) != before:
            raise UnsupportedStateError(
                f"a tensor with the placements {tuple(placements)}, cut in an unknown order, cannot be stored",
            )
        before *= sizes[n]
    return cuts[::-1]


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _replica(mesh: Any, rank: int, placements: Sequence[Any], coordinate: Sequence[int]) -> tuple[int, int]:
    """Return this rank's number among the replicas, and their count; uses all mesh dimensions that cut nothing."""
    replica, replicas = 0, 1
    for placement, at, size in zip(placements, coordinate, mesh.shape, strict=True):
        if placement.is_replicate():
            replica, replicas = replica * size + at, replicas * size
    beside, beside_of = _beside(mesh, rank)
    return replica * beside_of + beside, replicas * beside_of


@lru_cache(maxsize=64)
def _beside(mesh: Any, _rank: int) -> tuple[int, int]:
    """Return the number of this rank's mesh among its siblings (slices of one root mesh), and their count.

    Sibling meshes compare equal, but each names only the ranks of its own slice.
    """
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh()
    else:  # an older torch
        root = sys.modules["torch.distributed.device_mesh"]._mesh_resources.get_root_mesh(mesh)
    coordinates = torch.isin(root.mesh, mesh.mesh.reshape(-1)).nonzero()
    number, count = 0, 1
    for at, size in zip(coordinates.unbind(1), root.shape, strict=True):
        if size > 1 and bool((at == at[0]).all()):
            number, count = number * size + int(at[0]), count * size
    return number, count
