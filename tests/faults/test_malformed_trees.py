"""A checkpoint whose tree nobody can restore, under fitting digests: whoever answers for a checkpoint refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tasks import open_run
from ckpt_tasks.copying.fork import plan_fork
from ckpt_tasks.copying.syncing import plan_sync, run_sync
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.reading.reading import Run
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.upkeep.upkeep import verify_checkpoint
from tests.faults.hostile import NEWEST, STEPS, Hostile, train


@pytest.fixture
def run(run_dir: Path, tmp_path: Path) -> Run:
    """A run whose newest checkpoint names a tensor that it lacks."""
    train(run_dir)
    spoiled = {"~tensor": "extra/nothing"}
    Hostile(run_dir, tmp_path).change_manifest(lambda body: body["groups"]["extra"].update(tree=spoiled))
    return open_run(str(run_dir))


def test_verify_names_it(run: Run) -> None:
    """It is no good checkpoint, so no older one is given up for it."""
    (fault,) = verify_checkpoint(run.history.store, run.find(NEWEST))
    assert "extra/nothing" in fault
    assert verify_checkpoint(run.history.store, run.find(STEPS[0])) == []


def test_nobody_forks_it(run: Run, tmp_path: Path) -> None:
    """Nothing is begun with it."""
    target = LocalStore(str(tmp_path / "fork"))
    with pytest.raises(IntegrityError, match="extra/nothing"):
        plan_fork(run, run.find(NEWEST), target, {})
    assert not [*target.names("")]


def test_a_copy_leaves_it_out(run: Run, tmp_path: Path) -> None:
    """The others are copied, and it is reported."""
    target = LocalStore(str(tmp_path / "copy"))
    report = run_sync(run, target, plan_sync(run, target))
    assert any("extra/nothing" in str(row) for row in report.rows)
    assert {checkpoint.step for checkpoint in open_run(target.url).checkpoints()} == {*STEPS} - {NEWEST}
