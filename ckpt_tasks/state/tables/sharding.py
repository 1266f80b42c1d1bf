"""The rank that holds an id, and the exchange of ids and rows between ranks.

The rank of an id is its hash modulo the number of ranks. Exchanges use all_to_all_single, since gloo has no all_to_all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ckpt_tasks.state.splitmix import mixed
from ckpt_tasks.state.tables.table_rows import Floats, Ids


def owners(ids: Ids, world_size: int) -> Ids:
    """Return the rank that holds each id."""
    return (mixed(ids) % np.uint64(world_size)).astype(np.int64)


class Shards:
    """This rank among the ranks that share a table; one process is rank 0 of 1."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        alone = not dist.is_available() or not dist.is_initialized()
        self._group = group
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)

    def ask(self, ids: Ids) -> Asked:
        """Send each id to the rank that holds it; every rank must call this method."""
        if self.size == 1:
            return Asked(ids, slice(None), None, None)
        owner = owners(ids, self.size)
        order = np.argsort(owner, kind="stable")
        sent = np.bincount(owner, minlength=self.size)
        got = self._exchange(sent, None, None)
        return Asked(self._exchange(ids[order], sent, got), order, sent, got)

    def send(self, values: npt.NDArray[np.float64], asked: Asked) -> npt.NDArray[np.float64]:
        """Send values of the requested ids to the ranks that hold them; return the values for `asked.ids`, in order."""
        return self._exchange(values[asked.order], asked.sent, asked.got)

    def answer(self, rows: Floats, asked: Asked) -> Floats:
        """Send the rows of `asked.ids` back; return the rows that this rank requested, in the order of its request."""
        came = self._exchange(rows, asked.got, asked.sent)
        answered = np.empty_like(came)
        answered[asked.order] = came
        return answered

    def _exchange(self, values: npt.NDArray[Any], sent: Ids | None, got: Ids | None) -> npt.NDArray[Any]:
        if self.size == 1:
            return values
        shape = values.shape if got is None else (int(got.sum()), *values.shape[1:])
        into = torch.empty(shape, dtype=torch.from_numpy(values[:0]).dtype)
        got_sizes, sent_sizes = (None if counts is None else counts.tolist() for counts in (got, sent))
        held = torch.from_numpy(np.ascontiguousarray(values))
        dist.all_to_all_single(into, held, got_sizes, sent_sizes, group=self._group)
        return into.numpy()


class Asked(NamedTuple):
    """The ids that ranks request from this rank, rank after rank, and order and counts of its own requests.

    One process asks itself: all ids as they are, without counts.
    """

    ids: Ids
    order: Ids | slice
    sent: Ids | None
    got: Ids | None
