"""Write a rank's portions of tensors as shards, straight from the tensors, which DCP has copied or keeps unchanged.

The files are as in any other save: one for each group, several for a large group. A rank's second portion of a tensor
is in another file, since a file has each name once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from ckpt_tasks.checkpoint.memory.snapshot import MAX_SHARD_BYTES, bytes_of
from ckpt_tasks.checkpoint.restore.boxes import within
from ckpt_tasks.checkpoint.save.parts import RankPart, joined, put_tensors
from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.format.keys import Attempt, attempt_prefix, shard_name
from ckpt_tasks.format.layout.columns import shared_region_bytes
from ckpt_tasks.format.layout.image import REGION_BYTES, TensorSpec, plan_image, plan_parts
from ckpt_tasks.format.layout.regions import Box
from ckpt_tasks.state.tensors.tensors import DTYPES, refuse
from ckpt_tasks.storage.port import Store


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
    region_bytes = REGION_BYTES if world_size == 1 else shared_region_bytes(total_bytes, total_items)
    rounds: dict[tuple[str, int], dict[str, Portion]] = {}
    for portion in portions:
        group, _, name = portion.key.partition("/")
        turn = next(turn for turn in range(len(portions)) if name not in rounds.get((group, turn), {}))
        rounds.setdefault((group, turn), {})[name] = portion
    parts, numbers = [], dict[str, int]()
    for (group, _), by_name in rounds.items():
        places = {portion.key: (portion.full_shape, portion.offset) for portion in by_name.values()}
        specs = [
            TensorSpec(name, DTYPES[portion.tensor.dtype], tuple(portion.tensor.shape))
            for name, portion in by_name.items()
        ]
        for some in plan_parts(specs, MAX_SHARD_BYTES):
            number = numbers[group] = numbers.get(group, -1) + 1
            name = attempt_prefix(attempt) + shard_name(group, rank, world_size, number)
            layout, data_of = plan_image(some, region_bytes), partial(_bytes, by_name)
            parts.append(put_tensors(store, name, group, layout, data_of, places=places))
    return replace(joined(parts, rank), step=attempt.step)


def _bytes(portions: Mapping[str, Portion], name: str) -> memoryview:
    return bytes_of(portions[name].tensor.detach().resolve_conj().resolve_neg().to("cpu"))


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
    start = (0,) * len(full)
    for portion in portions:
        within(whole, Box(portion.offset, tuple(portion.tensor.shape)), Box(start, full)).copy_(portion.tensor)
    return Portion(key, whole, full, start)
