"""format/layout/tiling.py: the proof that boxes cover a tensor exactly, against a model that paints its elements."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.format.layout import tiling
from ckpt_tasks.format.layout.regions import Box
from ckpt_tasks.format.layout.tiling import untiled

Case = tuple[tuple[int, ...], list[Box]]


def tiles(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Paint every element of every box: the brute-force model of what tiling means."""
    if 0 in shape:
        return boxes == [Box((0,) * len(shape), shape)]
    painted = np.zeros(shape, int)
    for box in boxes:
        ends = [begin + extent for begin, extent in zip(box.offset, box.shape, strict=True)]
        if (
            min((*box.offset, 0)) < 0
            or min((*box.shape, 1)) < 1
            or any(e > n for e, n in zip(ends, shape, strict=True))
        ):
            return False
        painted[tuple(slice(begin, end) for begin, end in zip(box.offset, ends, strict=True))] += 1
    return bool((painted == 1).all())


def wrong(cases: list[Case]) -> list[int]:
    """Return the numbers of the tensors, all of as many dimensions, that their boxes do not tile."""
    rows = [(n, shape, box) for n, (shape, boxes) in enumerate(cases) for box in boxes]
    dims = len(cases[0][0])
    columns = [shape for _, shape, _ in rows], [box.offset for *_, box in rows], [box.shape for *_, box in rows]
    full, offset, extent = (np.array(column, np.int64).reshape(len(rows), dims) for column in columns)
    found: list[int] = untiled(np.array([n for n, _, _ in rows], np.int64), full, offset, extent).tolist()
    return found


@st.composite
def almost_tilings(draw: st.DrawFn, dims: int) -> Case:
    """Draw a tensor cut like a grid or box by box, then perhaps damaged: a box dropped, doubled, moved or resized."""
    shape = tuple(draw(st.integers(0, 4)) for _ in range(dims))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    spans = [list(pairwise(c)) or [(0, 0)] for c in cuts]
    boxes = [Box(tuple(a for a, _ in spot), tuple(b - a for a, b in spot)) for spot in product(*spans)]
    for _ in range(draw(st.integers(0, 2)) if dims else 0):  # no grid: one box is cut alone
        at, axis = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, dims - 1))
        offset, extent = boxes[at]
        if extent[axis] > 1:
            half = extent[axis] // 2
            boxes[at] = Box(offset, (*extent[:axis], half, *extent[axis + 1 :]))
            rest = (*extent[:axis], extent[axis] - half, *extent[axis + 1 :])
            boxes.append(Box((*offset[:axis], offset[axis] + half, *offset[axis + 1 :]), rest))
    at = draw(st.integers(0, len(boxes) - 1))
    box = boxes[at]
    match draw(st.sampled_from(["none", "drop", "double", "move", "resize", "swap", "empty"])):
        case "drop" if len(boxes) > 1:
            del boxes[at]
        case "double":
            boxes.append(box)
        case "move":
            boxes[at] = Box(tuple(o + draw(st.integers(-1, 1)) for o in box.offset), box.shape)
        case "resize":
            boxes[at] = Box(box.offset, tuple(n + draw(st.integers(-1, 1)) for n in box.shape))
        case "swap":
            boxes[at] = Box(tuple(draw(st.permutations(box.offset))), box.shape)
        case "empty":
            boxes.append(Box(box.offset, (0,) * dims))
    return shape, list(draw(st.permutations(boxes)))


@given(st.integers(0, 3).flatmap(lambda dims: st.lists(almost_tilings(dims), min_size=1, max_size=4)))
def test_the_proof_agrees_with_painting_every_element(cases: list[Case]) -> None:
    """P38, P47, P48: a hole, an overlap or a box outside is found, and a true tiling is never refused."""
    assert wrong(cases) == [n for n, (shape, boxes) in enumerate(cases) if not tiles(shape, boxes)]


def test_boxes_with_too_many_corners_are_refused() -> None:
    """P42: boxes that are cut along 24 dimensions would have 2²⁴ corners each."""
    shape = (2,) * 24
    halves = [Box((n, *(0,) * 23), (1, *(2,) * 23)) for n in (0, 1)]
    assert wrong([(shape, halves)]) == []
    corner = Box((0,) * 24, (1,) * 24)
    assert tiling.MAX_CORNERS < 2 * 2**24
    assert wrong([(shape, [corner, *halves])]) == [0]
