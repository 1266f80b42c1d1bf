"""Small lookup tables, and the dict that each has to be equal to."""

from __future__ import annotations

from typing import Any

import torch

from ckpt_tasks import LookupTable
from ckpt_tasks.state.tables.rules import Adam

Rows = dict[int, list[list[float]]]


def table(dim: int = 3) -> LookupTable:
    return LookupTable(dim, slots=Adam(lr=0.1), seed=5)


def train(users: LookupTable, ids: list[int], weight: float = 1.0) -> None:
    """Give the rows of these ids a gradient that follows from place and weight, and update them."""
    given = users(torch.tensor(ids, dtype=torch.int64))
    (given * torch.arange(given.numel()).reshape(given.shape).add(weight)).sum().backward()
    users.step()


def rows_of(*tables: LookupTable) -> Rows:
    """Return row, slots and step of every id, bit for bit; the ranks of a table have no id in common."""
    found: Rows = {}
    for users in tables:
        for place in users.store.used.tolist():
            one = int(users.store.ids[place])
            assert one not in found
            found[one] = [values[place].tolist() for values in users.store.values] + [[int(users.store.steps[place])]]
    return found


def about(users: LookupTable) -> tuple[Any, ...]:
    return rows_of(users), users.updates, users.rule, users.seed, users.spread
