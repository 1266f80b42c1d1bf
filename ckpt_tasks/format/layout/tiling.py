"""A check that boxes tile their tensors exactly: each element once, none outside; for columns of 10⁶ boxes.

The proof is by signed corners. A box has 2ⁿ corners, each with a sign: minus if an odd number of its coordinates are
upper ends. Boxes tile a tensor exactly if and only if their signed corners add up to the signed corners of the tensor,
because signed corners determine how often boxes cover each element. The check leaves out a dimension that no box of the
tensor cuts, so that n boxes cost O(n log n) for any number of dimensions.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

MAX_CORNERS = 1 << 24  # All boxes of a call may have this many corners: 10⁶ boxes that are cut along four dimensions.

Numbers = npt.NDArray[np.int64]


def untiled(tensor: Numbers, full: Numbers, offset: Numbers, shape: Numbers) -> Numbers:
    """Return the numbers of the tensors that their boxes do not tile.

    Each row is a box. `tensor` (int64, shape (n,)) is the number of its tensor, in rising order. `full`, `offset` and
    `shape` (int64, (n, d)) are the tensor's shape, and the box's first index and extent; all tensors have d dimensions.
    The rows of one tensor have the same `full`. A tensor without elements needs one box, the whole tensor; boxes of
    other tensors must have elements. Tensors whose boxes exceed MAX_CORNERS corners count as not tiled.
    """
    if not len(tensor):
        return tensor
    starts = np.flatnonzero(np.r_[True, tensor[1:] != tensor[:-1]])
    counts = np.diff(np.r_[starts, len(tensor)])
    group = np.repeat(np.arange(len(starts)), counts)  # Number the tensors 0, 1, 2 …
    outside = ((offset < 0) | (shape < 0) | (offset > full) | (shape > full - offset)).any(axis=1)
    empty_box, empty = (shape == 0).any(axis=1), (full[starts] == 0).any(axis=1)
    itself = ((offset == 0) & (shape == full)).all(axis=1)
    bad = np.logical_or.reduceat(outside | (empty_box & ~empty[group]), starts)
    bad |= empty & ((counts != 1) | ~itself[starts])
    bad |= (counts == 1) & ~itself[starts]
    rest = (counts > 1) & ~bad & ~empty
    cut = np.logical_or.reduceat((offset != 0) | (shape != full), starts)  # A flag for each tensor and dimension.
    dims = cut.sum(axis=1)
    corners_left = MAX_CORNERS
    for count in np.unique(dims[rest]).tolist():
        chosen = np.flatnonzero(rest & (dims == count))
        corners = int(counts[chosen].sum()) << count if count < 40 else MAX_CORNERS + 1
        if corners > corners_left:
            bad[chosen] = True
            continue
        corners_left -= corners
        # Usually all rows are chosen: avoid the copy.
        rows = slice(None) if len(chosen) == len(starts) else np.flatnonzero(np.isin(group, chosen))
        axes = np.argsort(~cut, axis=1, kind="stable")[group[rows], :count]
        begin, extent, whole = (np.take_along_axis(column[rows], axes, axis=1) for column in (offset, shape, full))
        bad[_unbalanced(group[rows], begin, begin + extent, whole)] = True
    return tensor[starts[bad]]


def row_major_faults(full: Numbers, offset: Numbers, shape: Numbers, first: Numbers) -> npt.NDArray[np.bool_]:
    """Return a flag for each box: True if the box is not contiguous in row-major order, or is out of order.

    `first`: the first row of each row's tensor; the other arguments are as for `untiled`.
    """
    if not full.shape[1]:
        return np.zeros(len(full), np.bool_)
    # Mark the dimensions to the right of the first dimension with an extent other than 1.
    inner = np.zeros(shape.shape, np.bool_)
    inner[:, 1:] = np.cumsum(shape != 1, axis=1)[:, :-1] > 0
    faults: npt.NDArray[np.bool_] = (inner & (shape != full)).any(axis=1)
    step = np.zeros_like(offset)
    step[1:] = offset[1:] - offset[:-1]
    ahead = np.take_along_axis(step, (step != 0).argmax(axis=1)[:, None], axis=1)[:, 0]
    faults |= (ahead <= 0) & (np.arange(len(full)) != first)
    return faults


def _unbalanced(group: Numbers, begin: Numbers, end: Numbers, whole: Numbers) -> Numbers:
    """Return the groups in which the boxes' signed corners do not add up to the tensor's signed corners."""
    first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    plus, minus = _corners(group, begin, end)
    # Swap the signs of the tensors' own corners: then plus and minus corners must be equal.
    own_plus, own_minus = _corners(group[first], np.zeros_like(whole[first]), whole[first])
    sides = np.concatenate((plus, own_minus), axis=1), np.concatenate((minus, own_plus), axis=1)
    extents = [int(group[-1]) + 1, *(int(extent) + 1 for extent in whole.max(axis=0))]
    if math.prod(extents) < 1 << 63:  # Code each corner as one number: sorting takes a tenth of the time.
        one, other = (np.sort(np.ravel_multi_index(tuple(side), extents)) for side in sides)
        if np.array_equal(one, other):
            return first[:0]
    corners = np.concatenate(sides, axis=1)
    weight = np.repeat(np.array([1, -1]), [side.shape[1] for side in sides])
    order = np.lexsort(corners[::-1])
    corners = corners[:, order]
    starts = np.flatnonzero(np.r_[True, (corners[:, 1:] != corners[:, :-1]).any(axis=0)])
    return np.unique(corners[0, starts[np.add.reduceat(weight[order], starts) != 0]])


def _corners(group: Numbers, low: Numbers, high: Numbers) -> tuple[Numbers, Numbers]:
    """Return the plus corners and the minus corners, one column (group, coordinates) per corner."""
    axes = range(low.shape[1])
    signed: list[list[Numbers]] = [[np.zeros((1 + len(axes), 0), np.int64)] for _ in range(2)]
    for corner in range(1 << len(axes)):
        upper = [corner >> axis & 1 for axis in axes]
        signed[sum(upper) % 2].append(np.stack([group, *((low, high)[upper[axis]][:, axis] for axis in axes)]))
    plus, minus = (np.concatenate(corners, axis=1) for corners in signed)
    return plus, minus
