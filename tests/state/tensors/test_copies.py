"""The memory of live tensors as the target of stored ones."""

from __future__ import annotations

import torch

from ckpt_tasks.state.tensors.copies import Copies
from ckpt_tasks.state.tensors.tensors import expanded


def test_tensors_without_memory_share_none() -> None:
    """Each of several empty tensors is the target of its own stored tensor; one memory is that of one alone."""
    copies = Copies()
    assert [copies.bind(torch.empty(0), key) for key in ("a", "b", "c")] == [True, True, True]
    live = torch.zeros(3)
    assert [copies.bind(live, key) for key in ("d", "e", "d")] == [True, False, True]


def test_an_expanded_dimension_is_narrowed() -> None:
    """A repeated dimension becomes one element; one without elements stays without."""
    shapes = [tuple(expanded(torch.zeros(1, 2).expand(rows, 2)).shape) for rows in (0, 1, 3)]
    assert shapes == [(0, 2), (1, 2), (1, 2)]
