"""A save of a replay buffer writes the rows that were added, and every checkpoint has all of them."""

from __future__ import annotations

import signal
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings

from ckpt_tasks import Checkpointer, ReplayBuffer, open_run
from ckpt_tasks.errors import ConfigError, IntegrityError, StateMismatchError
from ckpt_tasks.format.saved_kinds import check_group
from ckpt_tasks.format.tree import TensorRef
from tests.state.tables.test_histories import History, Op, Told, history, ops
from tests.state.tables.test_saves import config
from tests.support.cli_runs import ckpt, flip
from tests.support.gang import run
from tests.support.interpreters import python
from tests.support.sweeps import quick_first

KINDS = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
CAPACITY = 64


def buffer(capacity: int = CAPACITY) -> ReplayBuffer:
    return ReplayBuffer(capacity, n=torch.int64, x=(np.float32, (2, 2)), done=bool)


def add(replay: ReplayBuffer, count: int) -> None:
    """Add rows that follow from their numbers."""
    n = torch.arange(replay.added, replay.added + count)
    replay.extend(n=n, x=n[:, None, None].expand(-1, 2, 2) / 3, done=n % 3 == 0)


def contents(live: ReplayBuffer) -> Any:
    at = [n % live.capacity for n in range(live.added - len(live), live.added)]
    return live.added, {name: live.values[name][at].tolist() for name in live.columns}


def restored(place: Path, replay: ReplayBuffer | None = None, **given: Any) -> ReplayBuffer:
    replay, run = buffer() if replay is None else replay, open_run(str(place))
    run.restore(run.checkpoints()[0], {"replay": replay}, **given)
    return replay


def made(place: Path) -> Any:
    """Make a run whose newest checkpoint has files of older ones, which retention has removed."""
    replay = buffer()
    with Checkpointer(config(place, max_num_checkpoints=1)) as held:
        held.restore({"replay": replay})
        for step, count in enumerate((70, 9, 3), start=1):
            add(replay, count)
            held.save(step, {"replay": replay})
        held.prune()
    return contents(replay)


def test_a_save_writes_the_rows_that_were_added(tmp_path: Path) -> None:
    """A file has the rows since the save before, as columns that any Arrow reader opens; no new row, no new file."""
    replay = buffer()
    with Checkpointer(config(tmp_path)) as held:
        held.restore({"replay": replay})
        add(replay, 10)
        held.save(1, {"replay": replay})
        add(replay, 2)
        held.save(2, {"replay": replay})
        third = held.save(3, {"replay": replay})
        assert all(file.contents is None for file in replay.chain.files), "what storage has is not kept in memory"
    first, second = sorted(tmp_path.rglob("replay-*.arrow"))
    assert third.reuses == tuple(str(path.relative_to(tmp_path)) for path in (first, second))
    rows = pa.ipc.open_file(second).read_all()
    x = [np.full(4, n / 3, np.float32).tolist() for n in (10, 11)]
    assert rows.to_pydict() == {"done": [False, False], "n": [10, 11], "x": x}
    assert contents(restored(tmp_path)) == contents(replay)


@pytest.mark.slow
def test_a_save_costs_what_was_added(tmp_path: Path) -> None:
    """A row is written twice or less if saves of 16 of 512 rows are merged to 32; files of overwritten rows go."""
    replay, written, counts = buffer(512), list[int](), list[int]()
    with Checkpointer(config(tmp_path, max_num_checkpoints=1)) as held:
        for step in range(1, 81):
            add(replay, 16)
            before = replay.chain.files
            held.save(step, {"replay": replay})
            written.append(sum(file.count for file in replay.chain.files if file not in before))
            counts.append(len(replay.chain.files))
    assert (max(written), max(counts)) == (32, 17)
    assert sum(written) <= 2 * replay.added
    assert contents(restored(tmp_path, buffer(512))) == contents(replay)


def test_another_run_gets_all_rows(tmp_path: Path) -> None:
    """A buffer that two Checkpointers save is whole in both runs."""
    replay = buffer()
    with Checkpointer(config(tmp_path / "a")) as one, Checkpointer(config(tmp_path / "b")) as other:
        for step, held in enumerate((one, other, one, other), start=1):
            add(replay, 20)
            held.save(step, {"replay": replay})
    assert contents(restored(tmp_path / "b")) == contents(replay)


@pytest.mark.parametrize("kind", KINDS)
def test_each_dtype_comes_back(tmp_path: Path, kind: str) -> None:
    """The bits of every dtype come back, as a number or in an array, given by its name in torch or in NumPy."""
    replay, again = (ReplayBuffer(3, a=getattr(torch, kind), b=(kind, (3,))) for _ in range(2))
    bits = np.frombuffer(np.random.default_rng(1).bytes(64), np.uint8)
    values = bits % 2 == 1 if kind == "bool" else bits.view(kind)
    with Checkpointer(config(tmp_path)) as held:
        for n in range(5):
            replay.append(a=values[n], b=torch.from_numpy(values[n : n + 3].copy()))
        held.save(1, {"replay": replay})
    restored(tmp_path, again)
    for name in "ab":
        assert again.values[name].tobytes() == replay.values[name].tobytes() != bytes(replay.values[name].nbytes)
    assert {name: str(one.dtype) for name, one in again.sample(2).items()} == dict.fromkeys("ab", f"torch.{kind}")


class Added(Told):
    """The values of all rows that were ever added, by their numbers."""

    def train(self, ids: tuple[int, ...]) -> None:
        for one in ids:
            self.rows[self.updates] = one, 0
            self.updates += 1

    def all(self) -> Any:
        return self.updates, {"n": [one for one, _ in self.rows.values()][-CAPACITY:]}


class Ring(History):
    """A run with a replay buffer."""

    begun = Added

    @staticmethod
    def new() -> ReplayBuffer:
        return ReplayBuffer(CAPACITY, n=torch.int64)

    all = staticmethod(contents)

    @staticmethod
    def check_files(users: ReplayBuffer) -> None:
        assert len(users.chain.files) <= 36

    def train(self, op: Op) -> None:
        ids = op.ids * 5 if op.kind == "grow" else op.ids
        self.users.extend(n=np.array(ids, np.int64))
        self.told.train(ids)

    grow = delete = evict = train


@settings(deadline=None)
@given(ops())
def test_each_checkpoint_has_the_rows_that_it_had(history_: list[Op]) -> None:
    """Added, saved, failed, restarted, killed, rolled back, merged, pruned: it has the newest rows of its time."""
    with history(Ring) as made:
        for op in history_:
            made.do(op)
        made.check()


@pytest.mark.parametrize("kills", quick_first([((2, 35),), ((41, 77),)]))
def test_a_killed_dqn_ends_as_one_that_was_not(tmp_path: Path, kills: tuple[int, int]) -> None:
    """Killed twice, a DQN trains each step with the same loss, and ends with the same bits, as without a kill."""
    job = ("-m", "tests.state.tables.replay_job")
    whole = python(*job, tmp_path / "whole", 90, 0)
    assert whole.returncode == 0, whole.stderr
    killed = [python(*job, tmp_path / "killed", 90, kill) for kill in (*kills, 0)]
    assert [one.returncode for one in killed] == [-signal.SIGKILL, -signal.SIGKILL, 0], killed[-1].stderr
    assert {*whole.stdout.splitlines()} == {line for one in killed for line in one.stdout.splitlines()}
    assert killed[-1].stdout.splitlines()[0] != whole.stdout.splitlines()[0], "it has not resumed"


GOOD = {"n": 1, "x": torch.zeros(2, 2), "done": False}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"n": one} for one in (0.5, 2**70, "1", float("nan"), None, torch.zeros(1))),
        *({"x": one} for one in (torch.zeros(2), [[1], [1, 2]], torch.zeros(2, 2, dtype=torch.bfloat16))),
        *({"done": 2}, {"more": 1}),
    ],
    ids=str,
)
def test_a_wrong_row_is_refused(wrong: dict[str, Any]) -> None:
    """A row with another column, shape or number raises ConfigError, alone or among others, and nothing is added."""
    replay = buffer()
    for call in (replay.append, lambda **row: replay.extend(**{key: [one] for key, one in row.items()})):
        with pytest.raises(ConfigError):
            call(**{**GOOD, **wrong})
    with pytest.raises(ConfigError, match="rows"):
        replay.extend(n=[1, 2], x=torch.zeros(1, 2, 2), done=[True, True])
    with pytest.raises(ConfigError):
        replay.sample(1)
    assert (len(replay), replay.added) == (0, 0)


def test_another_buffer_is_refused(tmp_path: Path) -> None:
    """Another capacity or other columns are a difference, and nothing is changed; the buffer alone can be restored."""
    before = made(tmp_path)
    for other in (buffer(65), ReplayBuffer(CAPACITY, n=torch.int32, x=(np.float32, (2, 2)), done=bool)):
        add(other, 1)
        with pytest.raises(StateMismatchError, match="replay"):
            restored(tmp_path, other)
        assert other.added == 1
    replay = buffer()
    with Checkpointer(config(tmp_path)) as held:
        assert held.restore({"weights": torch.ones(1), "replay": replay}, only=["replay"]) == 3
    assert contents(replay) == before


@pytest.mark.parametrize("verb", quick_first(["sync", "fork"]))
def test_a_copy_is_whole_and_damage_is_found(tmp_path: Path, verb: str) -> None:
    """A copy has all files and is gone on from; `ckpt verify` names a flipped bit, and a restore changes nothing."""
    before = made(tmp_path / "run")
    assert ckpt(verb, tmp_path / "run", tmp_path / "copy").status == 0
    replay = buffer()
    with Checkpointer(config(tmp_path / "copy")) as held:
        assert held.restore({"replay": replay}) == 3
        add(replay, 1)
        assert len(held.save(4, {"replay": replay}).reuses) == 3
    assert contents(restored(tmp_path / "copy")) == contents(replay)
    assert contents(restored(tmp_path / "run")) == before
    path = min((tmp_path / "copy").rglob("replay-*.arrow"))
    flip(path, path.stat().st_size // 2)
    assert path.name in ckpt("verify", tmp_path / "copy").out
    with pytest.raises(IntegrityError):
        restored(tmp_path / "copy", replay)
    assert replay.added == before[0] + 1


def job(rank: int, size: int, place: str) -> int:
    replay = buffer()
    with Checkpointer(config(Path(place))) as held:
        step = held.restore({"replay": replay}) + 1
        add(replay, 5 + rank)
        held.save(step, {"replay": replay})
    return replay.added


def test_each_rank_has_its_own(tmp_path: Path) -> None:
    """Two ranks restore what each has saved; another number of ranks is refused."""
    assert [run(2, job, str(tmp_path)) for _ in range(2)] == [[5, 6], [10, 12]]
    with pytest.raises(StateMismatchError, match="of 2 ranks"):
        restored(tmp_path)


def test_a_tree_that_no_buffer_has_is_refused() -> None:
    """A field of another kind than the format says is damage."""
    tree: dict[str, Any] = {"capacity": 2, "added": 3, "columns": [["n", "int64", [2]]], "files": [TensorRef("r/0")]}
    check_group("r", "replay", tree)
    for name, wrong in product(tree, (None, "x", [-1])):
        with pytest.raises(IntegrityError):
            check_group("r", "replay", tree | {name: wrong})
