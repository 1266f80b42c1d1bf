"""Write a rank's portions of tensors as shards, straight from the tensors, which DCP has copied or keeps unchanged.

The files are those of any other save: one for each group, several for a large group. A rank's second portion of a
tensor is in another file, since a file has each name once.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.format.digests import digest_bytes, digest_hex
from ckpt_tasks.format.keys import Attempt, attempt_prefix, shard_name
from ckpt_tasks.format.manifest import ObjectRecord
from ckpt_tasks.layout.columns import MAX_REGIONS
from ckpt_tasks.layout.image import MIN_REGION_BYTES, REGION_BYTES, ImageLayout, TensorSpec, plan_image, plan_parts
from ckpt_tasks.layout.index import Index
from ckpt_tasks.saving.parts import RankPart, joined
from ckpt_tasks.snapshot.snapshot import MAX_SHARD_BYTES, storable
from ckpt_tasks.storage.port import Store
from ckpt_tasks.tensors.tensors import DTYPES, refuse


class Portion(NamedTuple):
    """A part of a tensor: its full key, its values, the whole tensor's shape, and the part's offset."""

    key: str
    tensor: torch.Tensor
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]


def write_portions(
    store: Store,
    attempt: Attempt,
    portions: Sequence[Portion],
    *,
    rank: int,
    world_size: int,
    total_bytes: int,
    total_items: int,
) -> RankPart:
    """Digest and put portions; `total_bytes` and `total_items`, of all ranks, determine the size of the regions.

    Raises UnsupportedStateError for a tensor that cannot be stored, before anything is put.
    """
    for portion in portions:
        refuse(portion.tensor, portion.key, exact=False)
    if world_size == 1:
        portions = _whole(portions)
    region_bytes = REGION_BYTES if world_size == 1 else MIN_REGION_BYTES
    while region_bytes < REGION_BYTES and total_bytes // region_bytes + total_items > MAX_REGIONS // 2:
        region_bytes *= 2
    rounds: dict[tuple[str, int], dict[str, Portion]] = {}
    for portion in portions:
        group, _, name = portion.key.partition("/")
        turn = next(turn for turn in range(len(portions)) if name not in rounds.get((group, turn), {}))
        rounds.setdefault((group, turn), {})[name] = portion
    parts, numbers = [], dict[str, int]()
    for (group, _), by_name in rounds.items():
        specs = [
            TensorSpec(name, DTYPES[portion.tensor.dtype], tuple(portion.tensor.shape))
            for name, portion in by_name.items()
        ]
        for some in plan_parts(specs, MAX_SHARD_BYTES):
            number = numbers[group] = numbers.get(group, -1) + 1
            name = attempt_prefix(attempt) + shard_name(group, rank, world_size, number)
            parts.append(_put(store, name, plan_image(some, region_bytes), group, by_name))
    return replace(joined(parts, rank), step=attempt.step)


def _put(store: Store, name: str, layout: ImageLayout, group: str, portions: Mapping[str, Portion]) -> RankPart:
    """Digest and put one file; return it as a rank's part, for `joined`."""
    data = {slot.spec.name: _bytes(portions[slot.spec.name].tensor) for slot in layout.slots}
    begins = {slot.spec.name: slot.begin for slot in layout.slots}
    digests = [
        digest_bytes(data[spec.name][begin - begins[spec.name] : end - begins[spec.name]])
        for spec, _, begin, end in layout.regions
    ]
    store.put(name, [layout.header, *(piece for piece in data.values() if piece.nbytes)])
    regions = layout.regions
    index = Index.of_columns(
        [group] * len(regions),
        [spec.name for spec, *_ in regions],
        [spec.dtype for spec, *_ in regions],
        [portions[spec.name].full_shape for spec, *_ in regions],
        [tuple(map(operator.add, portions[spec.name].offset, box.offset)) for spec, box, *_ in regions],
        [box.shape for _, box, *_ in regions],
        [name] * len(regions),
        [begin for *_, begin, _ in regions],
        [end for *_, end in regions],
        digests,
    )
    record = ObjectRecord(name, layout.size_bytes, digest_hex(layout.header), len(layout.header))
    return RankPart(0, index, (record,))


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes in C order, as a view of its memory if possible."""
    dense = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    dense = storable(dense).contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data if dense.nbytes else memoryview(b"")


def _whole(portions: Sequence[Portion]) -> list[Portion]:
    """Join the portions of each tensor into one whole tensor: this rank writes all of it."""
    by_key: dict[str, list[Portion]] = {}
    for portion in portions:
        by_key.setdefault(portion.key, []).append(portion)
    return [some[0] if len(some) == 1 else _joined(key, some) for key, some in by_key.items()]


def _joined(key: str, portions: Sequence[Portion]) -> Portion:
    full = portions[0].full_shape
    whole = torch.empty(full, dtype=portions[0].tensor.dtype)
    if sum(portion.tensor.numel() for portion in portions) != whole.numel():
        raise UnsupportedStateError("the parts of a tensor do not make up all of it", key=key)
    for portion in portions:
        into = whole
        for axis, (begin, extent) in enumerate(zip(portion.offset, portion.tensor.shape, strict=True)):
            into = into.narrow(axis, begin, extent)
        into.copy_(portion.tensor)
    return Portion(key, whole, full, (0,) * len(full))
