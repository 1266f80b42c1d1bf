"""Boxes: how a tensor is cut into blocks, and what two boxes share."""

from __future__ import annotations

import math
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.format.layout.regions import Box, blocks, blocks_in_order, intersection

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def boxes_of(dims: int) -> st.SearchStrategy[Box]:
    numbers = st.tuples(*(st.integers(0, 4) for _ in range(dims)))
    return st.builds(Box, numbers, numbers)


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))))


@given(shapes, st.integers(1, 30))
def test_blocks_tile_any_tensor_and_stay_small(shape: tuple[int, ...], most: int) -> None:
    """P38: blocks cover every element once, none is larger than asked for, and each is one range of bytes."""
    found = blocks(shape, most)
    for box in found:
        places = [sum(i * math.prod(shape[axis + 1 :]) for axis, i in enumerate(index)) for index in elements(box)]
        assert places == list(range(places[0], places[0] + len(places))) if places else box.size == 0
    assert [element for box in found for element in elements(box)] == elements(Box((0,) * len(shape), shape))
    assert all(box.size <= most for box in found)


@given(shapes, st.integers(1, 30), st.integers(0, 99))
def test_blocks_in_another_order_are_not_in_order(shape: tuple[int, ...], most: int, at: int) -> None:
    """P38: blocks are a tensor in order as they are cut, and in no other order, and not without one of them."""
    boxes = blocks(shape, most)
    assert blocks_in_order(boxes, shape)
    at %= len(boxes)
    if math.prod(shape):
        assert not blocks_in_order(boxes[:at] + boxes[at + 1 :], shape)
    if len(boxes) > 1:
        assert not blocks_in_order([*boxes[1:], boxes[0]], shape)


@given(boxes_of(3), boxes_of(3))
def test_an_intersection_has_the_elements_of_both(a: Box, b: Box) -> None:
    """P48: the box that two boxes share has exactly their common elements."""
    both = {*elements(a)} & {*elements(b)}
    common = intersection(a, b)
    assert {*elements(common)} == both if common else not both
