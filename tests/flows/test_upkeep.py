"""flows/upkeep.py: what is damaged is told before anything is pruned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import ConfigError, IntegrityError
from ckpt_tasks.flows.session.local_session import LocalSession
from ckpt_tasks.flows.upkeep import upkeep
from tests.support.cli_runs import flip
from tests.support.ledgers import owner_of, take
from tests.support.owner_child import OwnerChild

pytestmark = pytest.mark.usefixtures("harness")


def saved(place: Path, steps: range) -> CheckpointConfig:
    """Make a run that keeps all, and return options under which only two stay."""
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(place), max_num_checkpoints=None)) as ckpt:
        for step in steps:
            ckpt.save(step, {"weights": torch.full((100,), float(step))})
    return CheckpointConfig(checkpoint_dir=str(place.parent / "{run_key}"), max_num_checkpoints=2)


def test_a_run_is_verified_and_pruned(tmp_path: Path) -> None:
    """Every checkpoint is read back, then those go that the policy does not keep."""
    config = saved(tmp_path / "run", range(1, 6))
    done = upkeep(run_key="run", checkpoint=config)
    assert done.verified.steps == (1, 2, 3, 4, 5)
    assert done.verified.size_bytes > 5 * 400
    assert done.pruned is not None
    assert (done.pruned.kept, done.pruned.removed) == ((4, 5), (1, 2, 3))
    assert [one.step for one in open_run(str(tmp_path / "run")).checkpoints()] == [5, 4]


def test_damage_is_told_and_nothing_is_pruned(tmp_path: Path) -> None:
    """The flow run fails and names the checkpoint that is damaged; all others are still there."""
    config = saved(tmp_path / "run", range(1, 6))
    shard = next((tmp_path / "run").glob("checkpoint_000000000005/*/*.safetensors"))
    shard.chmod(0o644)
    flip(shard, -1)
    with pytest.raises(IntegrityError, match=r"step 5: .*Nothing was pruned"):
        upkeep(run_key="run", checkpoint=config)
    assert len(open_run(str(tmp_path / "run")).checkpoints()) == 5
    [kept] = open_run(str(tmp_path / "run")).head().state.checks
    assert (kept.figures["checkpoints"], kept.figures["damaged_checkpoints"]) == (5, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_upkeep_drills_and_prunes_nothing_that_cannot_be_restored(tmp_path: Path) -> None:
    """The flow records a drill if it is asked to; one that fails fails the flow run, and everything stays."""
    one = CheckpointConfig(checkpoint_dir=str(tmp_path / "run"), memory_dir=None, max_num_checkpoints=1)
    with Checkpointer(replace(one, max_num_checkpoints=2)) as opened:
        session = LocalSession(opened, "tests.support.tiny:Tiny", {"width": 16})
        session.restore()
        session.run(3)
        session.save(3)
    with pytest.raises(IntegrityError, match="cannot restore the run"):
        upkeep(run_key="run", checkpoint=one, restore_drill=True, program="tests.support.tiny:wider")
    assert len(open_run(str(tmp_path / "run")).checkpoints()) == 2
    with pytest.raises(ConfigError, match="restore drill"):
        upkeep(run_key="run", checkpoint=one, program="tests.support.tiny:wider")
    done = upkeep(run_key="run", checkpoint=one, restore_drill=True)
    assert done.drilled is not None
    assert (done.drilled.figures["step"], done.drilled.fault) == (3, None)
    assert done.pruned is not None
    assert done.pruned.kept == (3,)


def test_a_run_that_trains_prunes_itself(tmp_path: Path) -> None:
    """Upkeep beside a living owner verifies and records it, takes nothing over, and prunes nothing."""
    config = saved(tmp_path / "run", range(1, 4))
    trainer = OwnerChild(tmp_path / "run")
    assert trainer.ask("acquire") == "ok"
    done = upkeep(run_key="run", checkpoint=config)
    assert trainer.ask("close") == "ok"
    trainer.kill()
    assert done.verified.steps == (1, 2, 3)
    assert done.pruned is None
    assert len(open_run(str(tmp_path / "run")).checkpoints()) == 3
    assert [one.figures["checkpoints"] for one in open_run(str(tmp_path / "run")).head().state.checks] == [3]


def test_who_may_train_elsewhere_is_left_alone(tmp_path: Path) -> None:
    """P33: an owner on another host that has shown no life for hours may still come back: upkeep does not fence it."""
    config = saved(tmp_path / "run", range(1, 4))
    history = open_run(str(tmp_path / "run")).history
    take(history, owner_of(2))
    assert upkeep(run_key="run", checkpoint=config).pruned is None
    owner = history.head().state.owner
    assert owner is not None
    assert owner.epoch == 2
