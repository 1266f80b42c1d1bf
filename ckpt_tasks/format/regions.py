"""Boxes of a tensor: how a tensor is cut into regions, and the proof that regions cover it exactly.

A region is a box (offset, shape). Cutting a tensor into blocks of bounded size lets a reader verify and read again
a part of it, and lets several threads work on one tensor. Every block is contiguous in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Box", "blocks", "tiling_fault"]

_MOST_SCATTERED = 4096  # boxes in another order are compared each with each


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
    whole = Box((0,) * len(shape), shape)
    if whole.size <= max(max_elements, 1):
        return [whole]
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
    """Say why the boxes do not tile a tensor of this shape exactly; None when they do.

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
    covered = sum(box.size for box in found)
    if covered != math.prod(shape):
        return f"the regions hold {covered} of {math.prod(shape)} elements"
    if _in_order(found, shape):
        return None
    if len(found) > _MOST_SCATTERED:
        return f"{len(found)} regions that do not follow each other, more than can be compared"
    return _overlap(found)


def _in_order(found: list[Box], shape: tuple[int, ...]) -> bool:
    """Say whether every box begins, in row-major order, where the one before it ends; the right number is a tiling."""
    at = 0
    for box in found:
        place = 0
        for first, full in zip(box.offset, shape, strict=True):
            place = place * full + first
        axis = next((axis for axis, extent in enumerate(box.shape) if extent != 1), len(shape))
        if place != at or box.shape[axis + 1 :] != shape[axis + 1 :]:
            return False
        at += box.size
    return True


def _overlap(found: list[Box]) -> str | None:
    # The right number of elements and no overlap means no hole. Sorted by the first index, a box can only overlap
    # those that have not ended before it begins.
    if not found or not found[0].shape:
        return None if len(found) <= 1 else "a 0-dimensional tensor has several regions"
    active: list[Box] = []
    for box in found:
        active = [other for other in active if other.offset[0] + other.shape[0] > box.offset[0]]
        for other in active:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(box.offset, box.shape, other.offset, other.shape, strict=True)
            ):
                return f"the regions {other.offset}+{other.shape} and {box.offset}+{box.shape} overlap"
        active.append(box)
    return None


def _indices(shape: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    if not shape:
        return [()]
    return [(first, *rest) for first in range(shape[0]) for rest in _indices(shape[1:])]
