"""A save of a lookup table writes what has changed, and every checkpoint has all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer, LookupTable, open_run
from ckpt_tasks.errors import IntegrityError, StateMismatchError
from ckpt_tasks.state.tables.rules import SGD
from ckpt_tasks.testing import die
from tests.support.cli_runs import flip
from tests.support.tables import about, rows_of, table, train


def config(place: Path, **given: Any) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_dir=str(place), **{"memory_dir": None, **given})


def restored(place: Path, step: int | str = "latest", users: LookupTable | None = None) -> LookupTable:
    users, run = users if users is not None else table(), open_run(str(place))
    run.restore(run.find(step), {"users": users})
    return users


def test_a_save_writes_the_rows_that_have_changed(tmp_path: Path) -> None:
    """A base has all rows, a delta those that changed and the deleted ids, and any Arrow reader opens both."""
    users = table()
    state = {"users": users}
    with Checkpointer(config(tmp_path)) as ckpt:
        ckpt.restore(state)
        train(users, [*range(100)])
        ckpt.save(1, state)
        train(users, [1, 2, 200])
        users.delete(users.ids[:1])
        second = ckpt.save(2, state)
        third = ckpt.save(3, state)  # nothing has changed
        assert all(file.contents is None for file in users.chain.files), "what storage has is not kept in memory"
    base, delta = sorted(tmp_path.rglob("users-*.arrow"))
    assert second.reuses == (str(base.relative_to(tmp_path)),)
    assert third.reuses == (*second.reuses, str(delta.relative_to(tmp_path)))
    rows = pa.ipc.open_file(delta).read_all()
    assert rows.column_names == ["id", "row", "exp_avg", "exp_avg_sq", "step", "deleted"]
    assert rows.select(["id", "step", "deleted"]).to_pylist() == [
        *({"id": one, "step": 2, "deleted": False} for one in (1, 2, 200)),
        {"id": 0, "step": 0, "deleted": True},
    ]
    assert rows.column("row").to_pylist()[:3] == [rows_of(users)[one][0] for one in (1, 2, 200)]
    assert pa.ipc.open_file(base).read_all().num_rows == 100
    assert about(restored(tmp_path)) == about(users)
    assert rows_of(restored(tmp_path, step=1)).keys() == {*range(100)}


def test_deltas_end_in_a_new_base(tmp_path: Path) -> None:
    """There are at most eight deltas, and fewer where they have more than half the rows of their base."""
    users = table()
    state = {"users": users}
    counts = []
    with Checkpointer(config(tmp_path, max_num_checkpoints=1)) as ckpt:
        ckpt.restore(state)
        train(users, [*range(100)])
        for step in range(1, 12):
            train(users, [step])
            ckpt.save(step, state)
            counts.append([file.count for file in users.chain.files])
        train(users, [*range(60)])
        ckpt.save(12, state)
        counts.append([file.count for file in users.chain.files])
        ckpt.prune()
    assert counts[8] == [100, *[1] * 8]
    assert counts[9:] == [[100], [100, 1], [100]]
    assert len([*tmp_path.rglob("users-*.arrow")]) == 1, "a base that no checkpoint has is pruned"
    assert about(restored(tmp_path)) == about(users)


def test_another_run_gets_a_base_of_its_own(tmp_path: Path) -> None:
    """A table that two Checkpointers save is whole in both runs."""
    users = table()
    with Checkpointer(config(tmp_path / "a")) as one, Checkpointer(config(tmp_path / "b")) as other:
        for ckpt in (one, other):
            ckpt.restore({"users": users})
        train(users, [*range(100)])
        for step, ckpt in enumerate((one, other, one, other), start=1):
            train(users, [step])
            ckpt.save(step, {"users": users})
    assert about(restored(tmp_path / "b")) == about(users)
    assert rows_of(restored(tmp_path / "a")).keys() == rows_of(users).keys()


def test_a_restart_from_memory_has_what_storage_lacks(tmp_path: Path) -> None:
    """A snapshot in memory has its delta; its base comes from storage, and a missing base is passed over."""
    users = table()
    state = {"users": users}
    place = config(tmp_path / "run", memory_dir=str(tmp_path))
    ckpt = Checkpointer(place)
    ckpt.restore(state)
    train(users, [*range(100)])
    ckpt.save(1, state)
    train(users, [1])
    ckpt.save(2, state)
    die(ckpt)
    (delta,) = tmp_path.glob("ckpt-tasks-*/*/?/users-*-1.arrow")
    assert pa.ipc.open_file(delta).read_all().num_rows == 1
    for path in tmp_path.glob("run/**/users-*-1.arrow"):
        path.write_bytes(b"")  # only memory has it now
    again = table()
    with Checkpointer(place) as ckpt:
        assert ckpt.restore({"users": again}) == 2
    assert about(again) == about(users)


@pytest.mark.parametrize("which", [0, 1])
def test_one_bit_flipped_in_a_file_is_noticed(tmp_path: Path, which: int) -> None:
    """A flipped bit in a base or in a delta passes the checkpoint over, and the live table stays as it is."""
    users, target = table(), table()
    with Checkpointer(config(tmp_path)) as ckpt:
        ckpt.restore({"users": users})
        train(users, [*range(100)])
        ckpt.save(1, {"users": users})
        train(users, [1])
        ckpt.save(2, {"users": users})
    path = sorted(tmp_path.rglob("users-*.arrow"))[which]
    flip(path, path.stat().st_size // 2)
    train(target, [7])
    before = about(target)
    with pytest.raises(IntegrityError, match="users"):
        restored(tmp_path, 2, target)
    assert about(target) == before


def test_another_table_is_refused_and_options_are_restored(tmp_path: Path) -> None:
    """Another length of rows or rule is a difference; a learning rate is that of the checkpoint."""
    users = table()
    with Checkpointer(config(tmp_path)) as ckpt:
        ckpt.restore({"users": users})
        train(users, [1])
        users.rule.lr = 0.25
        ckpt.save(1, {"users": users})
    for other in (LookupTable(4), LookupTable(3, slots=SGD())):
        with pytest.raises(StateMismatchError, match="users"):
            restored(tmp_path, users=other)
        assert other.count == 0
    again = restored(tmp_path)
    assert again.rule.lr == 0.25
