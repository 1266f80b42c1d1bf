"""run/opening.py: what is known of a checkpoint when it is opened, and what is found by who asks for it.

A checkpoint may have the right digests and a tree that nobody can restore: restore and verify refuse it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.transfer.fork import plan_fork
from ckpt_tasks.checkpoint.transfer.syncing import plan_sync, run_sync
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.run.opening import Opened, SavedGroup, open_checkpoint
from ckpt_tasks.run.upkeep.verifying import verify_checkpoint
from ckpt_tasks.state.restoring import plan_restore
from ckpt_tasks.storage.local import LocalStore
from tests.faults.hostile import NEWEST, STEPS, Hostile, train


def _state() -> dict[str, Any]:
    return {"model": torch.nn.Linear(2, 2), "extra": {"x": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}}


def _with_extra(run_dir: Path, tree: Any) -> Opened:
    """Save a state and open it, with another tree in the place of the group `extra`."""
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        ckpt.save(1, _state())
    run = open_run(str(run_dir))
    opened = open_checkpoint(run.history.store, run.find("latest"))
    groups = {**opened.manifest.groups, "extra": {"kind": "plain", "tree": tree}}
    manifest = replace(opened.manifest, groups=groups)
    return replace(opened, groups={name: SavedGroup(name, manifest, opened.index) for name in groups})


@pytest.mark.parametrize(
    "tree",
    [
        {"~tuple": 1},
        {"x": {"~tensor": "extra/y"}},
        {"x": {"~tensor": ["extra/x", 1]}},
        {"x": {"~tensor": ["extra/b", {"array": True}]}},
    ],
)
def test_a_malformed_tree_is_found_by_who_asks_for_it(run_dir: Path, tree: Any) -> None:
    """A restore of the model alone does not look at the trees of other groups; one of everything, and verify, do."""
    opened = _with_extra(run_dir, tree)
    plan = plan_restore({"model": _state()["model"]}, opened.groups, opened.tensors, partial=True)
    assert plan.keys == {"model/weight", "model/bias"}
    with pytest.raises(IntegrityError):
        plan_restore(_state(), opened.groups, opened.tensors)
    with pytest.raises(IntegrityError):
        opened.check_trees()


def test_nothing_is_made_of_a_checkpoint_that_lacks_a_tensor(run_dir: Path, tmp_path: Path) -> None:
    """Verify names it, so that no older one is given up; a fork refuses it; a copy leaves it out and says so."""
    train(run_dir)
    spoiled = {"~tensor": "extra/nothing"}
    Hostile(run_dir, tmp_path).change_manifest(lambda body: body["groups"]["extra"].update(tree=spoiled))
    run = open_run(str(run_dir))
    (fault,) = verify_checkpoint(run.history.store, run.find(NEWEST))
    assert "extra/nothing" in fault
    assert verify_checkpoint(run.history.store, run.find(STEPS[0])) == []
    fork, copy = (LocalStore(str(tmp_path / name)) for name in ("fork", "copy"))
    with pytest.raises(IntegrityError, match="extra/nothing"):
        plan_fork(run, run.find(NEWEST), fork, {})
    assert not [*fork.names("")]
    report = run_sync(run, copy, plan_sync(run, copy))
    assert any("extra/nothing" in str(row) for row in report.rows)
    assert {checkpoint.step for checkpoint in open_run(copy.url).checkpoints()} == {*STEPS} - {NEWEST}
