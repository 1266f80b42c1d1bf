"""The regions of a stored tensor that a target needs, and the part of the target that each region holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.format.layout.regions import Box, blocks_in_order, intersection
from ckpt_tasks.state.tensors.placements import ALONE, local_of, place_of


class Piece(NamedTuple):
    """A part of a target tensor, its box in the whole tensor, and the region that holds its values."""

    into: torch.Tensor
    box: Box
    row: IndexRow

    @property
    def is_whole(self) -> bool:
        """Whether the piece needs all of its region."""
        return self.box == self.row.box


def box_of(into: torch.Tensor, key: str) -> Box:
    """Return the box of a tensor that a target covers: all of it, or this rank's part of a DTensor."""
    return place_of(into, key, ALONE).box


def meets(row: IndexRow, boxes: Iterable[Box]) -> bool:
    """Return True if a region shares at least one element with one of the boxes."""
    return 0 in row.tensor_shape or any(intersection(row.box, box) is not None for box in boxes)


def pieces(into: torch.Tensor, key: str, rows: Iterable[IndexRow]) -> Iterator[Piece]:
    """Cut a target tensor into the parts that each region of the stored tensor holds."""
    box, local = box_of(into, key), local_of(into).detach()
    for row in rows:
        common = intersection(row.box, box)
        if common is not None:
            yield Piece(within(local, common, box), common, row)


def stacked(rows: Sequence[IndexRow]) -> list[IndexRow]:
    """Join regions of one tensor whose bytes and elements follow one another; a joined row has no digest.

    Ranks write small regions, and one copy of many bytes costs less than many copies of few.
    """
    joined: list[IndexRow] = []
    for row in rows:
        box = _stack(joined[-1], row) if joined else None
        if box is None:
            joined.append(row)
        else:
            joined[-1] = joined[-1]._replace(box=box, end=row.end, digest=b"")
    return joined


def _stack(one: IndexRow, two: IndexRow) -> Box | None:
    """Return the box of two regions together; None if their consecutive bytes are not its elements in C order."""
    (offset, shape), (after, more) = one.box, two.box
    if one.object != two.object or one.end != two.begin or not shape:
        return None
    axis = 0
    while shape[axis] == 1 and offset[axis] == after[axis] and axis < len(shape) - 1:
        axis += 1
    before, rest = shape[:axis], axis + 1
    fits = before == more[:axis] and (offset[rest:], shape[rest:]) == (after[rest:], more[rest:])
    if not fits or offset[axis] + shape[axis] != after[axis]:
        return None
    return Box(offset, (*before, shape[axis] + more[axis], *shape[rest:]))


def within(tensor: torch.Tensor, box: Box, of: Box) -> torch.Tensor:
    """View a box of a tensor; `tensor` itself is the box `of` of the whole tensor."""
    for axis, (begin, extent, base) in enumerate(zip(box.offset, box.shape, of.offset, strict=True)):
        if extent != tensor.shape[axis]:
            tensor = tensor.narrow(axis, begin - base, extent)
    return tensor


def boxes_in_order(rows: Sequence[IndexRow]) -> bool:
    """Return True if the regions hold a tensor's elements in order, contiguous in one object."""
    first = rows[0]
    if len(rows) == 1:
        return first.box.shape == first.tensor_shape
    boxes = blocks_in_order([row.box for row in rows], first.tensor_shape)
    return boxes and all(b.object == a.object and b.begin == a.end for a, b in pairwise(rows))
