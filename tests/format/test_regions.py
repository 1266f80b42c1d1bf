"""Boxes: how a tensor is cut, and the proof that boxes cover it exactly, against a model that paints elements."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.format.regions import Box, blocks, tiling_fault
from tests.support.resources import counted_steps

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))))


def tiles(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Paint every element of every box, in order: the brute-force model of what tiling means."""
    if any(len(box.offset) != len(shape) or len(box.shape) != len(shape) for box in boxes):
        return False
    if any(n < 0 or o < 0 for box in boxes for o, n in zip(box.offset, box.shape, strict=True)):
        return False
    painted = [element for box in sorted(boxes) for element in elements(box)]
    whole = elements(Box((0,) * len(shape), shape))
    if not whole:
        return boxes == [Box((0,) * len(shape), shape)]
    return painted == whole and all(box.size for box in boxes)


@given(shapes, st.integers(1, 30))
def test_blocks_tile_any_tensor_and_stay_small(shape: tuple[int, ...], most: int) -> None:
    """The blocks of a tensor cover every element once, in row-major order, and none is larger than asked for."""
    found = blocks(shape, most)
    assert tiles(shape, found)
    assert tiling_fault(shape, found) is None
    assert [element for box in found for element in elements(box)] == elements(Box((0,) * len(shape), shape))
    assert all(box.size <= most for box in found)


@st.composite
def almost_tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a tensor cut at random places, then perhaps damaged: a box dropped, doubled, moved or resized."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    spans = [list(pairwise(c)) or [(0, 0)] for c in cuts]
    found: list[Box] = [Box(tuple(a for a, _ in spot), tuple(b - a for a, b in spot)) for spot in product(*spans)]
    damaged: bool = draw(st.booleans())
    if found and damaged:
        at = draw(st.integers(0, len(found) - 1))
        box = found[at]
        match draw(st.sampled_from(["drop", "double", "move", "resize", "swap", "empty", "rank"])):
            case "drop":
                del found[at]
            case "double":
                found.append(box)
            case "move":
                found[at] = Box(tuple(o + draw(st.integers(-1, 1)) for o in box.offset), box.shape)
            case "resize":
                found[at] = Box(box.offset, tuple(n + draw(st.integers(-1, 1)) for n in box.shape))
            case "swap":
                found[at] = Box(tuple(draw(st.permutations(box.offset))), box.shape)
            case "empty":
                found.append(Box(box.offset, (0,) * len(box.shape)))
            case "rank":
                found[at] = Box((*box.offset, 0), (*box.shape, 1))
    return shape, list(draw(st.permutations(found)))


@given(almost_tilings())
def test_the_proof_agrees_with_painting_every_element(case: tuple[tuple[int, ...], list[Box]]) -> None:
    """P38, P47, P48: a hole, an overlap, a box outside or out of order is found, and a true tiling never refused."""
    shape, boxes = case
    assert (tiling_fault(shape, boxes) is None) == tiles(shape, boxes)


@pytest.mark.parametrize(
    ("shape", "boxes", "words"),
    [
        ((4,), [Box((0,), (3,))], "3 of 4 elements"),
        ((4,), [Box((0,), (2,)), Box((1,), (2,))], "overlap"),
        ((2, 2), [Box((0, 0), (1, 2)), Box((0, 1), (1, 1)), Box((1, 1), (1, 1))], "overlap"),
        ((4,), [Box((0,), (1,)), Box((2,), (2,))], "hole before"),
        ((2, 2), [Box((0, 0), (2, 1)), Box((0, 1), (2, 1))], "not contiguous"),
        ((4,), [Box((2,), (3,)), Box((0,), (1,))], "outside"),
        ((4,), [Box((0, 0), (4, 1))], "dimensions"),
        ((0, 3), [], "empty tensor"),
        ((), [Box((), ()), Box((), ())], "overlap"),
        ((2,), [Box((0,), (2,)), Box((1,), (0,))], "empty region"),
    ],
)
def test_a_fault_says_what_is_wrong(shape: tuple[int, ...], boxes: list[Box], words: str) -> None:
    """P47: the reason names the hole, the overlap or the box."""
    assert words in (tiling_fault(shape, boxes) or "")


def test_many_regions_cost_no_more_than_their_number() -> None:
    """P42: twice as many regions take twice the steps, whether they tile the tensor or lie in columns."""
    steps = []
    for n in (500, 1000):
        rows, columns = [Box((at, 0), (1, n)) for at in range(n)], [Box((0, at), (n, 1)) for at in range(n)]
        with counted_steps() as count:
            assert tiling_fault((n, n), rows) is None
            assert "not contiguous" in (tiling_fault((n, n), columns) or "")
            assert "overlap" in (tiling_fault((n, n), [Box((0, 0), (n, n)), *rows]) or "")
        steps.append(count())
    assert steps[1] < 2.5 * steps[0]
