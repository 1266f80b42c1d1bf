"""Histories of a lookup table against a dict: whatever happens, each checkpoint has the rows that it had."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from ckpt_tasks import CheckpointConfig, Checkpointer, LookupTable, open_run
from ckpt_tasks.errors import StoreError
from ckpt_tasks.state.tables.rows import new_rows
from ckpt_tasks.state.tables.rules import SGD
from ckpt_tasks.testing import FaultyStore, MemoryStore, die, located
from tests.support.tables import Rows, rows_of

DIM, LR, KEPT = 2, 0.5, 4


class Op(NamedTuple):
    """What happens next, to which ids."""

    kind: str
    ids: tuple[int, ...] = ()
    which: int = 0


def ops() -> st.SearchStrategy[list[Op]]:
    ids = st.lists(st.integers(-3, 12), max_size=8).map(tuple)
    changes = st.builds(Op, st.sampled_from(["train", "train", "grow", "delete", "evict"]), ids)
    saves = st.builds(Op, st.sampled_from(["save", "save", "step", "fail"]))
    others = st.builds(
        Op, st.sampled_from(["restart", "kill", "roll back", "prune"]), st.just(()), st.integers(0, KEPT)
    )
    return st.lists(st.one_of(changes, saves, saves, others), min_size=5, max_size=40)


class Told:
    """The dict: each id's row and the update that changed it last."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[Any, int]] = {}
        self.updates = 0

    def copy(self) -> Told:
        copy = type(self)()
        copy.rows, copy.updates = dict(self.rows), self.updates
        return copy

    def train(self, ids: tuple[int, ...]) -> None:
        self.updates += 1
        sums = dict[int, int]()
        for place, one in enumerate(ids):
            self.rows.setdefault(one, (new_rows(np.array([one]), DIM, 0, 1.0)[0], 0))
            sums[one] = sums.get(one, 0) + place + 1
        for one, gradient in sums.items():
            self.rows[one] = self.rows[one][0] - np.float32(LR) * np.float32(gradient), self.updates

    def delete(self, ids: tuple[int, ...]) -> None:
        for one in ids:
            self.rows.pop(one, None)

    def evict(self) -> None:
        self.delete(tuple(one for one, (_, used) in self.rows.items() if used <= self.updates - 2))

    def all(self) -> tuple[Rows, int]:
        return {one: [row.tolist(), [used]] for one, (row, used) in self.rows.items()}, self.updates


class History:
    """A run, its live table and the dict of it, and the dict of every save.

    A step may be saved again after an older one was restored: each save is known by its step and by the number that
    the ledger's next entry had when training last began to go on from a checkpoint.
    """

    begun: type[Any] = Told

    def __init__(self, memory_dir: str) -> None:
        self._store, self._step = FaultyStore(MemoryStore()), 0
        self._place = CheckpointConfig(
            checkpoint_dir=located(self._store), memory_dir=memory_dir, step_interval=1, max_num_checkpoints=KEPT
        )
        self._saved: list[tuple[int, int, Any]] = [(0, 0, self.begun())]
        self._begin()

    @staticmethod
    def new() -> Any:
        return LookupTable(DIM, slots=SGD(lr=LR), spread=1.0)

    @staticmethod
    def all(live: Any) -> Any:
        return rows_of(live), live.updates

    @staticmethod
    def check_files(users: Any) -> None:
        assert len(users.chain.files) <= 9
        base, *deltas = (file.count for file in users.chain.files)
        assert 2 * sum(deltas) <= base

    def _begin(self) -> None:
        """Start as a new process does, and compare what it finds."""
        self.users = self.new()
        self.state = {"users": self.users}
        self.ckpt = Checkpointer(self._place)
        self._restored()

    def _restored(self) -> None:
        """Compare what is restored: the newest checkpoint, or a later save that was left in memory."""
        self._step, newest = self.ckpt.restore(self.state), [*self.ckpt.checkpoints()[:1]]
        entry = next((one.n for one in newest if one.step == self._step), None)
        self.told = self._told_of(self._step, entry).copy()
        self._since = self.ckpt.run.head().next_n
        assert self.all(self.users) == self.told.all()

    def _told_of(self, step: int, entry: int | None) -> Any:
        """Return what the table was when a step was last saved, before the entry of the ledger if that is given."""
        return [told for n, at, told in self._saved if at == step and (entry is None or n <= entry)][-1]

    def do(self, op: Op) -> None:
        event(op.kind)
        getattr(self, op.kind.replace(" ", "_"))(op)

    def train(self, op: Op) -> None:
        weights = torch.arange(1.0, len(op.ids) + 1)[:, None].expand(-1, DIM)
        (self.users(torch.tensor(op.ids, dtype=torch.int64)) * weights).sum().backward()
        self.users.step()
        self.told.train(op.ids)

    def grow(self, op: Op) -> None:
        self.train(Op("grow", tuple(one * 100 + n for n, one in enumerate(op.ids))))

    def delete(self, op: Op) -> None:
        self.users.delete(torch.tensor(op.ids, dtype=torch.int64))
        self.told.delete(op.ids)

    def evict(self, op: Op) -> None:
        self.users.evict(2)
        self.told.evict()

    def save(self, op: Op) -> None:
        self._step += 1
        self._saved.append((self._since, self._step, self.told.copy()))
        self.ckpt.save(self._step, self.state)

    def step(self, op: Op) -> None:
        self._step += 1
        self._saved.append((self._since, self._step, self.told.copy()))
        self.ckpt.step(self._step, self.state)  # a thread saves it, unless a newer one comes before

    def fail(self, op: Op) -> None:
        self.ckpt.wait()
        rule = self._store.on("refused", verb="put", name=r"checkpoint_.*")
        try:
            self.save(op)
            raise AssertionError("it has to fail")
        except StoreError:
            self._store.off(rule)

    def restart(self, op: Op) -> None:
        """End in order: the next process goes on from the newest step that was saved or stepped."""
        self.ckpt.close()
        self._begin()

    def kill(self, op: Op) -> None:
        """End as if killed, with a snapshot in memory."""
        self.ckpt.wait()
        die(self.ckpt)
        self._begin()

    def roll_back(self, op: Op) -> None:
        self.ckpt.wait()
        live = self.ckpt.checkpoints()
        if live:
            target = live[op.which % len(live)].step
            self.ckpt.rollback(target)
            self._restored()

    def prune(self, op: Op) -> None:
        self.ckpt.wait()
        self.ckpt.prune()

    def check(self) -> None:
        """Every checkpoint that is there has the rows that it had, in files of which none is there in vain."""
        self.ckpt.wait()
        self.ckpt.prune()
        run = open_run(located(self._store))
        for checkpoint in run.checkpoints():
            users = self.new()
            run.restore(checkpoint, {"users": users})
            assert self.all(users) == self._told_of(checkpoint.step, checkpoint.n).all()
            self.check_files(users)


@contextmanager
def history(kind: type[History] = History) -> Iterator[History]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory_dir:
        made = kind(memory_dir)
        try:
            yield made
        finally:
            made.ckpt.close()


SAVED_AGAIN = [Op("save"), Op("train", (1, 2)), Op("save"), Op("save"), Op("roll back", (), 2), Op("save")]


@settings(deadline=None)
@given(ops())
@example(SAVED_AGAIN)  # step 2 is there twice, with other rows
def test_each_checkpoint_has_the_rows_that_it_had(history_: list[Op]) -> None:
    """Grown, changed, deleted, saved, failed, restarted, killed, rolled back, compacted, pruned: equal to a dict."""
    with history() as made:
        for op in history_:
            made.do(op)
        made.check()
