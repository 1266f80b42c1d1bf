"""The regions of a tensor as few, large copies."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.checkpoint.restore.boxes import stacked
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.format.layout.regions import Box, blocks


@given(
    st.lists(st.integers(1, 6), max_size=4), st.integers(1, 40), st.integers(0, 4), st.randoms(use_true_random=False)
)
def test_joined_regions_hold_the_elements_of_their_boxes(
    shape: list[int], elements: int, gaps: int, draw: random.Random
) -> None:
    """Wherever bytes have a gap or blocks another order, joined regions still hold their box's elements in order.

    Without gaps, and with whole slices along the first axis, one region is left.
    """
    tensor = torch.arange(draw.randint(2, 9) * max(1, torch.Size(shape).numel())).int()
    tensor = tensor[: torch.Size(shape).numel()].reshape(shape)
    boxes = blocks(shape, elements)
    if draw.random() < 0.2:
        draw.shuffle(boxes)
    broken = {draw.randrange(len(boxes)) for _ in range(gaps)}
    memory, rows = list[int](), list[IndexRow]()
    for number, box in enumerate(boxes):
        memory += [-1] * (number in broken)
        begin = 4 * len(memory)
        memory += _part(tensor, box).reshape(-1).tolist()
        rows.append(IndexRow("g", "k", "int32", tuple(shape), box, "o", begin, 4 * len(memory), b"d"))
    joined = stacked(rows)
    assert sum(row.box.size for row in joined) == tensor.numel()
    for row in joined:
        assert memory[row.begin // 4 : row.end // 4] == _part(tensor, row.box).reshape(-1).tolist()
    in_order = boxes == blocks(shape, elements)
    if in_order and broken <= {0} and shape and elements >= tensor.numel() // shape[0]:
        assert len(joined) == 1


def test_a_region_that_does_not_follow_stays_alone() -> None:
    """Regions of another object, beside each other, or of other extents are not joined."""
    first = IndexRow("g", "k", "int32", (4, 4), Box((0, 0), (2, 2)), "o", 0, 16, b"d")
    others = [
        first._replace(box=Box((2, 0), (2, 2)), begin=16, end=32, object="p"),
        first._replace(box=Box((0, 2), (2, 2)), begin=16, end=32),
        first._replace(box=Box((2, 0), (2, 4)), begin=16, end=48),
        first._replace(box=Box((3, 0), (1, 2)), begin=16, end=24),
        first._replace(box=Box((2, 0), (2, 2)), begin=20, end=36),
    ]
    assert all(stacked([first, other]) == [first, other] for other in others)


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for axis, (begin, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(axis, begin, extent)
    return tensor
