"""A position in the data, and the record of the samples up to it: spans of each epoch's order, and the ids in them.

A row of the record is [first epoch, number of epochs, begin, end]: in each of these epochs, the samples from position
`begin` up to `end` of the epoch's order. Skipped batches and the end of an epoch add a row, steps do not. Two adjacent
spans of an epoch become one span, so the record does not depend on resumes. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tasks.format.tree import children
from ckpt_tasks.state.data.order import Permutation

Ranges = NDArray[np.int64]  # Shape (n, 2): pairs (first id, id after the last), sorted, not adjacent.

_OF_SAMPLER = {"epoch", "samples", "size", "seed", "shuffle", "order_version"}
_OF_STREAM = {"epoch", "samples", "batch", "workers", "turn", "places", "replayed"}


class Position:
    """A position in numbered samples or in a stream, which a ResumableLoader moves.

    `moves` counts restores and skips: after each, a running iterator starts again at the new position.
    """

    def __init__(self) -> None:
        self._epoch = self._samples = self.moves = 0

    @property
    def epoch(self) -> int:
        """The number of completed epochs, and so the number of the next batch's epoch."""
        return self._epoch

    @property
    def samples(self) -> int:
        """The number of samples of this epoch that all ranks together have received; for a stream, this rank."""
        return self._samples


class Seen:
    """The record of a position since (epoch, samples) `since`: closed `rows`, and an open span from `begin` on."""

    def __init__(self) -> None:
        self.since = [0, 0]
        self.rows: list[list[int]] = []
        self.begin = 0

    def add(self, epoch: int, end: int) -> None:
        """Record the samples from `begin` up to `end`; the next span starts at `end`."""
        self.rows, self.begin = _with_span(self.rows, epoch, self.begin, end), end

    def state(self, epoch: int, end: int) -> dict[str, Any]:
        """Return the record as plain numbers, with the open span up to `end`."""
        rows = _with_span(self.rows, epoch, self.begin, end)
        return {"since": [*self.since], "rows": [[*row] for row in rows]}

    def set(self, state: Mapping[str, Any]) -> None:
        """Replace the record by the record of a state."""
        self.since, self.rows = [*state["since"]], [[*row] for row in state["rows"]]


def _with_span(rows: list[list[int]], epoch: int, begin: int, end: int) -> list[list[int]]:
    if begin == end:
        return rows
    rows = [*rows]
    if rows and rows[-1][0] + rows[-1][1] - 1 == epoch and rows[-1][3] == begin:  # The span continues the last one.
        first, epochs, begin, _ = rows.pop()
        rows += [[first, epochs - 1, begin, _]] if epochs > 1 else []
    if rows and rows[-1][0] + rows[-1][1] == epoch and rows[-1][2:] == [begin, end]:
        first, epochs, *_ = rows.pop()
        return [*rows, [first, epochs + 1, begin, end]]
    return [*rows, [epoch, 1, begin, end]]


def positions_in(tree: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the states of samplers, loaders and streams in a decoded tree, each with its path."""
    if isinstance(tree, Mapping) and (tree.keys() >= _OF_SAMPLER or tree.keys() >= _OF_STREAM):
        yield place, tree
        return
    for key, item in children(tree):
        yield from positions_in(item, f"{place}/{key}")


def is_stream(state: Mapping[str, Any]) -> bool:
    """Return True if a position's state belongs to a stream."""
    return state.keys() >= _OF_STREAM


def spans_of(state: Mapping[str, Any]) -> dict[int, list[tuple[int, int]]]:
    """Return the recorded spans by epoch: the loop has received their samples."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for first, epochs, begin, end in state["seen"]["rows"]:
        for epoch in range(first, first + epochs):
            spans.setdefault(epoch, []).append((begin, end))
    return spans


def order_in(state: Mapping[str, Any], epoch: int, spans: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    """Return the sample ids in spans of an epoch's order, in the epoch's order."""
    places = [np.arange(begin, end, dtype=np.int64) for begin, end in spans]
    joined = np.concatenate(places) if places else np.empty(0, np.int64)
    return Permutation(state["size"], f"{state['seed']}/{epoch}")(joined) if state["shuffle"] else joined


def ids_in(state: Mapping[str, Any], epoch: int, spans: list[tuple[int, int]]) -> Ranges:
    """Return the sample ids in spans of an epoch's order as ranges."""
    size = state["size"]
    # Most epochs lack few samples: compute the ids of the spans, or else all other ids, whichever are fewer.
    fewer = 2 * sum(end - begin for begin, end in spans) <= size
    places = np.array(spans, dtype=np.int64).reshape(-1, 2)
    chosen = places if fewer else outside(places, size)
    ids = np.sort(order_in(state, epoch, map(tuple, chosen.tolist())))
    ranges = _joined(np.stack([ids, ids + 1], axis=1)) if len(ids) else np.empty((0, 2), np.int64)
    return ranges if fewer else outside(ranges, size)


def outside(ranges: Ranges, size: int) -> Ranges:
    """Return the ranges of range(size) that are not in `ranges`."""
    edges = np.concatenate([[0], ranges.ravel(), [size]]).reshape(-1, 2)
    return edges[edges[:, 0] < edges[:, 1]]


def times_seen(epochs: Iterable[Ranges], size: int) -> dict[int, Ranges]:
    """Return the ids of range(size) by how often the `epochs` have them, the highest number first."""
    every = [*epochs, np.array([[0, size]])]
    begins, ends = (np.concatenate([ranges[:, side] for ranges in every]) for side in (0, 1))
    edges, where = np.unique(np.concatenate([begins, ends]), return_inverse=True)
    steps = np.bincount(where, np.repeat([1, -1], [len(begins), len(ends)]), len(edges)).astype(np.int64)
    times = np.cumsum(steps)[:-1] - 1
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    return {int(n): _joined(pieces[times == n]) for n in sorted({*times.tolist()}, reverse=True)}


def _joined(ranges: Ranges) -> Ranges:
    apart = np.flatnonzero(ranges[1:, 0] != ranges[:-1, 1])
    return np.stack([ranges[[0, *(apart + 1)], 0], ranges[[*apart, -1], 1]], axis=1)
