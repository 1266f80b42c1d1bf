"""Boxes of a tensor: how a tensor is cut into regions, and the proof that regions cover it exactly.

A region is a box (offset, shape). Cutting a tensor into blocks of bounded size lets a reader verify and read again
a part of it, and lets several threads work on one tensor. Every block is contiguous in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Box", "blocks", "tiling_fault"]


class Box(NamedTuple):
    """A box of a tensor: its first index and its extent in every dimension, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def blocks(shape: Sequence[int], max_elements: int) -> list[Box]:
    """Cut a tensor into boxes of at most `max_elements`, each contiguous in row-major order, in that order.

    A tensor that is small enough, empty or 0-dimensional gives one box: itself.
    """
    shape = tuple(shape)
    full_box = Box((0,) * len(shape), shape)
    if full_box.size <= max(max_elements, 1):
        return [full_box]
    axis, inner = 0, math.prod(shape[1:])
    while inner > max_elements:  # single rows are too large: cut within them
        axis += 1
        inner = math.prod(shape[axis + 1 :])
    rows = max(1, max_elements // inner)
    found = []
    for lead in _indices(shape[:axis]):
        for begin in range(0, shape[axis], rows):
            count = min(rows, shape[axis] - begin)
            rest = shape[axis + 1 :]
            found.append(Box((*lead, begin, *(0,) * len(rest)), (*(1,) * axis, count, *rest)))
    return found


def tiling_fault(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Say why the boxes do not tile a tensor of this shape exactly, each contiguous in row-major order; else None.

    Exactly: each box inside, no element twice, no element missing. An empty tensor is tiled by one box, itself.
    """
    shape = tuple(shape)
    found = sorted(boxes)
    for box in found:
        if len(box.offset) != len(shape) or len(box.shape) != len(shape):
            return f"a region with {len(box.shape)} dimensions in a tensor with {len(shape)}"
        if any(o < 0 or n < 0 or o + n > full for o, n, full in zip(box.offset, box.shape, shape, strict=True)):
            return f"the region {box.offset}+{box.shape} lies outside of {shape}"
    if 0 in shape:
        return None if found == [Box((0,) * len(shape), shape)] else "an empty tensor must have one region, itself"
    if any(0 in box.shape for box in found):
        return "an empty region in a tensor that is not empty"
    at = 0  # contiguous boxes that follow each other tile: nothing has to be compared with all others
    for box in found:
        if not _is_contiguous(box, shape):
            return f"the region {box.offset}+{box.shape} is not contiguous in row-major order"
        begin = _place(box.offset, shape)
        if begin != at:
            what = "leave a hole before" if begin > at else "overlap at"
            return f"the regions {what} {box.offset}+{box.shape}"
        at += box.size
    return None if at == math.prod(shape) else f"the regions hold {at} of {math.prod(shape)} elements"


def _is_contiguous(box: Box, shape: tuple[int, ...]) -> bool:
    axis = next((axis for axis, extent in enumerate(box.shape) if extent != 1), len(shape))
    return box.shape[axis + 1 :] == shape[axis + 1 :]


def _place(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return where an element stands in row-major order."""
    place = 0
    for first, full in zip(index, shape, strict=True):
        place = place * full + first
    return place


def _indices(shape: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    if not shape:
        return [()]
    return [(first, *rest) for first in range(shape[0]) for rest in _indices(shape[1:])]
