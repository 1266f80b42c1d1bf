"""A lookup table on many ranks is one table: it is as a dict would have it, and any number of ranks restores it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tasks import CheckpointConfig, Checkpointer, LookupTable
from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.state.tables.rows import new_rows
from ckpt_tasks.state.tables.rules import SGD
from tests.support.gang import run
from tests.support.tables import Rows, rows_of

DIM, LR, SPREAD = 8, 0.5, 0.25
IDS = 8000


def batch(step: int) -> torch.Tensor:
    """Return the ids of a step: all of them first, then few, some of them several times, and new ones."""
    generator = torch.Generator().manual_seed(step)
    return torch.arange(IDS) if step == 1 else torch.randint(0, IDS + 50 * step, (80,), generator=generator)


def weights(step: int, count: int) -> torch.Tensor:
    """Return gradients that are whole numbers, so that their sums are exact, however ranks divide them."""
    return torch.arange(count * DIM).remainder(7 + step).sub(3).reshape(count, DIM).float()


def doomed(step: int) -> torch.Tensor:
    return torch.arange(100 * step, 100 * step + 30)


def job(rank: int, size: int, place: str, steps: int) -> tuple[int, Rows, int]:
    """Train from the newest checkpoint on; return where it began, this rank's rows, and the bytes of its last save."""
    users = LookupTable(DIM, slots=SGD(lr=LR), spread=SPREAD)
    state = {"users": users}
    with Checkpointer(CheckpointConfig(checkpoint_dir=place, memory_dir=None)) as ckpt:
        begun = ckpt.restore(state)
        for step in range(begun + 1, begun + steps + 1):
            ids, given = batch(step), weights(step, len(batch(step)))
            mine = np.array_split(np.arange(len(ids)), size)[rank]
            (users(ids[mine]) * given[mine] * size).sum().backward()
            users.step()
            if step % 3 == 0:
                users.delete(doomed(step))
            ckpt.save(step, state)
    return begun, rows_of(users), step


def replayed(last: int) -> Rows:
    """Return the rows after so many steps, by a dict."""
    rows: dict[int, Any] = {}
    used: dict[int, int] = {}
    for step in range(1, last + 1):
        ids, sums = batch(step).tolist(), dict[int, Any]()
        for one, gradient in zip(ids, weights(step, len(ids)).numpy().astype(np.float64), strict=True):
            rows.setdefault(one, new_rows(np.array([one]), DIM, 0, SPREAD)[0])
            sums[one] = sums.get(one, 0.0) + gradient
        for one, gradient in sums.items():
            rows[one] = rows[one] - np.float32(LR) * gradient.astype(np.float32)
            used[one] = step
        for one in doomed(step).tolist() if step % 3 == 0 else ():
            rows.pop(one, None)
    return {one: [row.tolist(), [used[one]]] for one, row in rows.items()}


def joined(parts: list[Rows]) -> Rows:
    rows = {one: values for part in parts for one, values in part.items()}
    assert len(rows) == sum(map(len, parts)), "two ranks have one id"
    return rows


def test_a_table_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Three ranks, then two, then one, with ids deleted and added: equal to a replay on a dict, bit for bit."""
    done = 0
    for size, steps in ((3, 3), (2, 2), (1, 1)):
        results = run(size, job, str(tmp_path), steps)
        assert {begun for begun, _, _ in results} == {done}
        done += steps
        assert joined([rows for _, rows, _ in results]) == replayed(done)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=2, max_size=4))
def test_any_numbers_of_ranks_follow_each_other(legs: list[tuple[int, int]]) -> None:
    """Whatever numbers of ranks follow each other, for however many steps: equal to a replay on a dict, bit for bit."""
    done = 0
    with tempfile.TemporaryDirectory() as place:
        for size, steps in legs:
            results = run(size, job, place, steps)
            done += steps
            assert joined([rows for _, rows, _ in results]) == replayed(done)


def test_ranks_write_what_has_changed(tmp_path: Path) -> None:
    """The files that ranks write in a save have the changed share of the bytes of all rows, and 5 % more at most."""
    run(4, job, str(tmp_path), 2)
    first, second = (
        sum(path.stat().st_size for path in tmp_path.glob(f"checkpoint_{step:012d}/*/users-*")) for step in (1, 2)
    )
    changed = len({*batch(2).tolist()}) / IDS
    assert changed < 0.011
    assert second <= (changed + 0.05) * first


def test_a_table_that_was_made_alone_is_refused(tmp_path: Path) -> None:
    """A table that does not know of the ranks would be saved by each of them as if it had all ids: it is refused."""
    errors = run(2, made_alone, str(tmp_path))
    assert all("rank 0 of 1" in error for error in errors)
    assert not (tmp_path / "format.json").exists()


def made_alone(rank: int, size: int, place: str) -> str:
    users = LookupTable(DIM)
    users.shards.rank, users.shards.size = 0, 1
    with Checkpointer(CheckpointConfig(checkpoint_dir=place, memory_dir=None)) as ckpt:
        with pytest.raises(UnsupportedStateError, match="users") as caught:
            ckpt.save(1, {"users": users})
        return str(caught.value)
