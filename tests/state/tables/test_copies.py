"""A delta keeps its base, wherever a checkpoint goes: forks, copies, verification, local copies and exports."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.testing import MemoryStore, located
from tests.state.tables.test_saves import config, restored
from tests.support.cli_runs import ckpt, flip
from tests.support.sweeps import quick_first
from tests.support.tables import about, rows_of, table, train


def made(place: Path) -> Any:
    """Make a run whose newest checkpoint has a base, of a checkpoint that retention has removed, and a delta."""
    users = table()
    with Checkpointer(config(place, max_num_checkpoints=1)) as held:
        held.restore({"users": users})
        train(users, [*range(100)])
        held.save(1, {"users": users})
        train(users, [1, 200])
        users.delete(torch.tensor([2]))
        held.save(2, {"users": users})
        held.prune()
    assert [checkpoint.step for checkpoint in open_run(str(place)).checkpoints()] == [2]
    return about(users)


@pytest.mark.parametrize("verb", quick_first(["fork", "sync"]))
def test_a_copy_has_the_base(tmp_path: Path, verb: str) -> None:
    """A fork and a sync of a checkpoint whose base an older one wrote can be restored, and gone on from."""
    before = made(tmp_path / "run")
    assert ckpt(verb, tmp_path / "run", tmp_path / "copy").status == 0
    assert ckpt("verify", tmp_path / "copy").status == 0
    assert about(restored(tmp_path / "copy")) == before
    users = table()
    with Checkpointer(config(tmp_path / "copy")) as held:
        assert held.restore({"users": users}) == 2
        train(users, [3])
        assert len(held.save(3, {"users": users}).reuses) == 2
    assert about(restored(tmp_path / "copy")) == about(users)
    assert about(restored(tmp_path / "run")) == before


def test_a_missing_or_damaged_base_is_found(tmp_path: Path) -> None:
    """`ckpt verify` names the base of a delta if a bit of it has changed, or if it is gone."""
    made(tmp_path)
    base = min(tmp_path.rglob("users-*.arrow"))
    flip(base, 1000)
    told = ckpt("verify", tmp_path)
    assert told.status != 0
    assert base.name in told.out
    base.unlink()
    told = ckpt("verify", tmp_path)
    assert told.status != 0
    assert base.name in told.out


def test_a_local_copy_is_whole(tmp_path: Path) -> None:
    """A local directory beside a server gets the base too, so that a restart reads nothing from the server."""
    store, users = MemoryStore(near=False), table()
    place = CheckpointConfig(checkpoint_dir=located(store), memory_dir=None, local_dir=str(tmp_path / "local"))
    for step in (1, 2):
        with Checkpointer(place) as held:
            assert held.restore({"users": users}) == step - 1
            train(users, [*range(100)] if step == 1 else [5])
            if step == 2:
                for path in (tmp_path / "local").rglob("users-*.arrow"):
                    path.unlink()
            held.save(step, {"users": users})
    again = table()
    with Checkpointer(place) as held:
        assert held.restore({"users": again}) == 2
        assert held.last_restore is not None
        assert str(tmp_path / "local") in held.last_restore.source
    assert about(again) == about(users)


def test_an_export_for_torch_has_the_files(tmp_path: Path) -> None:
    """An export for torch has a table's settings, and its files as the bytes that any Arrow reader opens."""
    rows, *_ = made(tmp_path / "run")
    assert ckpt("export", tmp_path / "run", tmp_path / "all.pt").status == 0
    users = torch.load(tmp_path / "all.pt", weights_only=True)["users"]
    base, delta = (pa.ipc.open_file(io.BytesIO(file.numpy().tobytes())).read_all() for file in users["files"])
    assert (users["count"], base.num_rows, delta.num_rows) == (len(rows), 100, 3)


def test_a_table_inside_of_a_module_is_named(tmp_path: Path) -> None:
    """A table inside of a module is refused if the state does not name it, before a save and before a restore."""
    model = torch.nn.ModuleDict({"users": table(), "net": torch.nn.Linear(3, 1)})
    with Checkpointer(config(tmp_path)) as held:
        for call in (held.restore, lambda state: held.save(1, state)):
            with pytest.raises(UnsupportedStateError, match="model/users"):
                call({"model": model})
        train(model["users"], [1, 2])  # type: ignore[arg-type]
        state = {"model": model, "users": model["users"]}
        held.restore(state)
        held.save(1, state)
    assert rows_of(restored_part(tmp_path)).keys() == {1, 2}


def restored_part(place: Path) -> Any:
    users, run = table(), open_run(str(place))
    run.restore(run.checkpoints()[0], {"users": users}, partial=True)
    return users
