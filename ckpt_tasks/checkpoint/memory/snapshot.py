"""A snapshot: a copy of the state in host memory, byte for byte as in its files.

The plan (which tensor at which offset of which file) depends only on names, dtypes, shapes and devices, and is kept
while these stay the same. Images are filled by plain copies, without serialising. memory.py provides their memory and
decides whether it outlives the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import eq

import torch

from ckpt_tasks.format.keys import shard_name
from ckpt_tasks.format.layout.columns import shared_region_bytes
from ckpt_tasks.format.layout.image import (
    REGION_BYTES,
    STORED_DTYPES,
    ImageLayout,
    Slot,
    TensorSpec,
    plan_image,
    plan_parts,
)
from ckpt_tasks.format.layout.index import Index, Places
from ckpt_tasks.format.policy.space import CheckpointSize
from ckpt_tasks.gc_pause import gc_paused
from ckpt_tasks.state.tensors.device import DeviceCopy, Devices
from ckpt_tasks.state.tensors.memcpy import LARGE_BYTES, Move, copy_tensors
from ckpt_tasks.state.tensors.tensors import REAL_DTYPES, tensor_at

MAX_SHARD_BYTES = 2 << 30


@dataclass(frozen=True)
class SnapshotPlan:
    """The plan of one state structure's files, each as (group, name, layout); `signature` identifies the structure.

    `devices` maps files whose tensors come from CUDA devices to one such device. `places` has, for each part of a
    sharded tensor, the shape of the whole tensor and the part's offset.
    """

    signature: tuple[_Described, ...]
    files: tuple[tuple[str, str, ImageLayout], ...]
    devices: Mapping[str, torch.device] = field(default_factory=dict)
    places: Places = field(default_factory=dict)

    def fits(self, tensors: Mapping[str, torch.Tensor], frozen: frozenset[str], places: Places) -> bool:
        """Return True if the plan was made for tensors with these keys, dtypes, shapes and devices."""
        same = map(eq, self.signature, _described(tensors, frozen))
        return len(self.signature) == len(tensors) and self.places == places and all(same)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file, by name."""
        return {name: layout.size_bytes for _, name, layout in self.files}

    @cached_property
    def size(self) -> CheckpointSize:
        """The bytes of the files in storage: those of each checkpoint, and frozen tensors, which are written once."""
        frozen = (dtype.itemsize * math.prod(shape) for _, dtype, shape, still, _ in self.signature if still)
        shared_bytes = sum(frozen)
        return CheckpointSize(sum(self.sizes.values()) - shared_bytes, shared_bytes)


class Image:
    """One file of a snapshot in memory: its group, its name, its layout and its bytes."""

    def __init__(self, group: str, name: str, layout: ImageLayout, buffer: memoryview, places: Places):
        self.group = group
        self.name = name
        self.layout = layout
        self.buffer = buffer
        self.bytes = buffer[: layout.size_bytes]
        self.bytes[: len(layout.header)] = layout.header
        self.views = {slot.spec.name: _writable(buffer, slot) for slot in layout.slots}
        self._places = places

    @cached_property
    def regions(self) -> Index:
        """The index rows of this file's regions, without object names and digests."""
        return Index.of_layout(self.group, self.layout, self._places)


class ImageSet:
    """The images of one snapshot. Two sets alternate: one is written to storage while the other is filled."""

    @gc_paused()
    def __init__(self, plan: SnapshotPlan, memory: Mapping[str, memoryview]):
        self.images = tuple(Image(group, name, layout, memory[name], plan.places) for group, name, layout in plan.files)
        self._places = [(f"{image.group}/{name}", view) for image in self.images for name, view in image.views.items()]
        self._devices = bool(plan.devices)
        self._large = {key: (view.data_ptr(), view.nbytes) for key, view in self._places if view.nbytes >= LARGE_BYTES}

    @gc_paused()
    def fill(
        self, tensors: Mapping[str, torch.Tensor], devices: Devices, constant: AbstractSet[str] = frozenset()
    ) -> DeviceCopy | LateCopy | None:
        """Copy captured tensors into the images: host tensors at once, device tensors on the devices' streams.

        The thread that waits for the result copies large `constant` tensors: wait before you read the images.
        """
        moves: list[Move] = []
        late: list[tuple[Move, torch.Tensor]] = []
        into, out_of = [], []
        on_devices: list[tuple[torch.Tensor, torch.Tensor]] = []
        for key, view in self._places:
            live = tensors[key]
            large = self._large.get(key)
            if self._devices and live.is_cuda:
                # Use our own alias: an assignment to the live tensor's `.data` must not free memory that the device
                # reads.
                on_devices.append((view, storable_tensors(live.detach())))
            elif large and live.is_cpu and live.is_contiguous():
                move = large[0], live.data_ptr(), large[1]
                if key in constant:
                    late.append((move, live))
                else:
                    moves.append(move)
            else:
                into.append(view)
                out_of.append(storable_tensors(live))
        copy = devices.start(on_devices) if on_devices else None  # Devices first: they copy while the host copies.
        copy_tensors(into, out_of, moves)
        return LateCopy(late, copy) if late else copy


class LateCopy:
    """Copies of constant tensors, which the thread that waits for them makes, and copies from devices."""

    def __init__(self, moves: Sequence[tuple[Move, torch.Tensor]], on_devices: DeviceCopy | None):
        self._moves = moves  # Each move with the tensor that keeps its memory alive.
        self._on_devices = on_devices

    def wait(self) -> None:
        """Copy everything; raise StateError if a device failed."""
        copy_tensors((), (), [move for move, _ in self._moves])
        self._moves = ()
        if self._on_devices is not None:
            self._on_devices.wait()


_Described = tuple[str, torch.dtype, torch.Size, bool, torch.device | None]


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(tensors: Mapping[str, torch.Tensor], frozen: frozenset[str] = frozenset()) -> Iterator[_Described]:
    """Yield the properties of each tensor on which a plan depends."""
    there = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # if not, skip 10⁵ calls of is_cuda
    return (
        (key, t.dtype, t.shape, key in frozen, t.device if there and t.is_cuda else None) for key, t in tensors.items()
    )


@gc_paused()
def plan_snapshot(
    tensors: Mapping[str, torch.Tensor],
    frozen: frozenset[str] = frozenset(),
    *,
    rank: int = 0,
    world_size: int = 1,
    places: Places | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> SnapshotPlan:
    """Lay out the files: one per group, several for a large group, and separate ones for frozen tensors."""
    signature = tuple(_described(tensors, frozen))
    groups: dict[str, tuple[list[TensorSpec], list[TensorSpec]]] = {}
    for full_key, dtype, shape, still, _ in signature:
        group, _, key = full_key.partition("/")
        groups.setdefault(group, ([], []))[still].append(TensorSpec(key, _name_of(dtype), tuple(shape)))
    region_bytes = REGION_BYTES
    if world_size > 1:
        total_bytes = world_size * sum(tensor.nbytes for tensor in tensors.values())
        region_bytes = shared_region_bytes(total_bytes, world_size * len(tensors))
    files = tuple(
        (group, shard_name(group, rank, world_size, number), plan_image(specs, region_bytes))
        for group, kinds in groups.items()
        for number, specs in enumerate(part for specs in kinds for part in plan_parts(specs, max_shard_bytes))
    )
    there = {key: device for key, *_, device in signature if device is not None}
    devices = {
        name: there[key]
        for group, name, layout in (files if there else ())
        for slot in layout.slots
        if (key := f"{group}/{slot.spec.name}") in there
    }
    return SnapshotPlan(signature, files, devices, places or {})


# Few kernels support these dtypes, so copy them as bytes. This version of torch may lack some of them.
_AS_BYTES = frozenset(
    name for name in STORED_DTYPES if name.startswith("float") and name not in ("float16", "float32", "float64")
)


_VIEWS: Mapping[torch.dtype, Callable[[torch.Tensor], torch.Tensor]] = {
    **{getattr(torch, name): lambda t: t.view(torch.uint8) for name in _AS_BYTES if hasattr(torch, name)},
    **{getattr(torch, name): lambda t: torch.view_as_real(t.resolve_conj()) for name in REAL_DTYPES},
}


def _writable(buffer: memoryview, slot: Slot) -> torch.Tensor:
    _, dtype, shape = slot.spec
    if dtype in _AS_BYTES:
        return tensor_at(buffer, "uint8", shape, slot.begin)
    if STORED_DTYPES[dtype].suffix:
        stored = {torch.float64: "float64", torch.float16: "float16"}[REAL_DTYPES[dtype]]
        return tensor_at(buffer, stored, (*shape, 2), slot.begin)
    return tensor_at(buffer, dtype, shape, slot.begin)


def storable_tensors(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as the dtype that its image uses: bytes for rare dtypes, pairs for unaligned complex numbers."""
    view = _VIEWS.get(tensor.dtype)
    return tensor if view is None else view(tensor)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a host tensor in C order, as its image has them; a view of its memory if possible."""
    dense = storable_tensors(tensor).contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data if dense.nbytes else memoryview(b"")
