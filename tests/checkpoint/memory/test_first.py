"""The first copy into a slot: the same bytes as any later one."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_tasks.checkpoint.memory.first import FirstCopy
from ckpt_tasks.checkpoint.memory.memory import MemoryDirectory, PrivateMemory, private_root
from ckpt_tasks.checkpoint.memory.snapshot import ImageSet, SnapshotPlan, plan_snapshot
from ckpt_tasks.errors import StoreError
from ckpt_tasks.state.tensors.device import Devices
from ckpt_tasks.state.tensors.tensors import DTYPES

_SIZES = st.sampled_from([(), (0,), (1,), (3, 5), (0, 4), (257, 64), (130, 131)])  # the last ones are large


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Draw tensors of every dtype and some sizes, in C order and not, in two groups."""
    found = {}
    for number in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(sorted(DTYPES, key=str)))
        shape = draw(_SIZES)
        count = dtype.itemsize * math.prod(shape)
        raw = torch.randint(2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
        tensor = raw.view(dtype).view(shape)
        if len(shape) == 2 and draw(st.booleans()):
            tensor = tensor.t()
        found[f"{draw(st.sampled_from(['model', 'optimizer']))}/{number}"] = tensor
    return found


def copied(plan: SnapshotPlan, state: dict[str, torch.Tensor]) -> list[bytes]:
    images = ImageSet(plan, PrivateMemory().take("a", plan.sizes))
    images.fill(state, Devices())
    return [bytes(image.bytes) for image in images.images]


@given(tensors(), st.sampled_from([1 << 14, 1 << 30]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_what_is_copied(
    tmp_path: Path, state: dict[str, torch.Tensor], max_shard_bytes: int
) -> None:
    """Of every dtype, shape and order the files have the bytes that a copy through a mapping would have."""
    plan, memory = plan_snapshot(state, max_shard_bytes=max_shard_bytes), MemoryDirectory(private_root(tmp_path), "run")
    try:
        first = FirstCopy(plan, state)
        images = ImageSet(plan, memory.take("a", plan.sizes, first.write))
        assert first.done
        assert [bytes(image.bytes) for image in images.images] == copied(plan, state)
    finally:
        memory.close(keep=False)


def test_a_slot_that_cannot_be_written_is_left_empty(tmp_path: Path) -> None:
    """P37: without room for all of a first copy nothing of it stays, and it is not taken for done."""
    state = {"model/x": torch.ones(1 << 20), "optimizer/y": torch.ones(1 << 20)}
    plan, memory = plan_snapshot(state), MemoryDirectory(private_root(tmp_path), "run")
    first = FirstCopy(plan, state)

    def fill(files: dict[str, int]) -> bool:
        read_only = os.open(os.devnull, os.O_RDONLY)
        try:
            return first.write({**files, max(files): read_only})  # EBADF, as good as ENOSPC
        finally:
            os.close(read_only)

    with pytest.raises(StoreError, match="bytes in"):
        memory.take("a", plan.sizes, fill)  # type: ignore[arg-type]
    assert not first.done
    assert not (memory.path / "a").exists()
    memory.close(keep=False)
