"""Boxes of a tensor, and the cut of a tensor into regions.

A region is a box (offset, shape). A tensor is cut into boxes of bounded size, so that a reader can verify and retry a
part of it, and several threads can work on it. Every box from `blocks` is contiguous in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A box of a tensor: its first index and its extent in each dimension, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements in the box."""
        return math.prod(self.shape)


def blocks(shape: Sequence[int], max_elements: int) -> list[Box]:
    """Cut a tensor into boxes of at most `max_elements`, each contiguous in row-major order, in that order.

    A small, empty or 0-dimensional tensor gives one box: the whole tensor.
    """
    shape = tuple(shape)
    full_box = Box((0,) * len(shape), shape)
    if full_box.size <= max(max_elements, 1):
        return [full_box]
    axis, inner = 0, math.prod(shape[1:])
    while inner > max_elements:  # One row is too large: cut within rows.
        axis += 1
        inner = math.prod(shape[axis + 1 :])
    rows = max(1, max_elements // inner)
    boxes = []
    for lead in _indices(shape[:axis]):
        for begin in range(0, shape[axis], rows):
            count = min(rows, shape[axis] - begin)
            rest = shape[axis + 1 :]
            boxes.append(Box((*lead, begin, *(0,) * len(rest)), (*(1,) * axis, count, *rest)))
    return boxes


def blocks_in_order(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Return True if boxes in this order cover a tensor's elements in row-major order, without a gap."""
    at = 0
    for box in boxes:
        axis = next((axis for axis, extent in enumerate(box.shape) if extent != 1), len(shape))
        place = 0
        for first, full in zip(box.offset, shape, strict=True):
            place = place * full + first
        if box.shape[axis + 1 :] != shape[axis + 1 :] or place != at:
            return False
        at += box.size
    return at == math.prod(shape)


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box of the elements that two boxes share; None if they share no element."""
    offset, shape = [], []
    for i, n, j, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True):
        begin = max(i, j)
        extent = min(i + n, j + m) - begin
        if extent <= 0:
            return None
        offset.append(begin)
        shape.append(extent)
    return Box(tuple(offset), tuple(shape))


def _indices(shape: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    if not shape:
        return [()]
    return [(first, *rest) for first in range(shape[0]) for rest in _indices(shape[1:])]
