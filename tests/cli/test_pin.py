"""`ckpt pin`, `unpin` and `rm`: a person decides about one checkpoint, and no rule and no other process undoes it."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckpt_tasks import open_run
from tests.support.cli_runs import ckpt, flip, only, save_steps, tree
from tests.support.owner_child import OwnerChild


def steps(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in open_run(run_dir).checkpoints()]


def test_a_pin_by_another_process_outlives_the_owners_commits(run_dir: Path) -> None:
    """P64: a run that another process trains is pinned; its next commits keep the pin, and its rule the checkpoint."""
    owner = OwnerChild(run_dir)
    assert owner.ask("save 1") == "ok 1"
    assert ckpt("pin", f"{run_dir}@1", "-m", "the paper").out.splitlines() == [
        f"{run_dir.name} step 1  {run_dir}",
        "Pinned: the paper. No rule removes it now.",
    ]
    for step in range(2, 8):
        assert owner.ask(f"save {step}") == f"ok {step}"
    assert owner.ask("close") == "ok"
    owner.kill()
    assert 1 in steps(run_dir)
    assert len(steps(run_dir)) < 7  # the rule has removed others
    assert [*open_run(run_dir).head().state.pins.values()] == ["the paper"]


def test_rm_removes_what_somebody_has_deleted_by_hand(run_dir: Path) -> None:
    """P65: a checkpoint without a single object leaves the ledger, and then the run verifies again."""
    shutil.rmtree(save_steps(run_dir, 1, 2) / "checkpoint_000000000001")
    assert ckpt("verify", run_dir).status == 1
    answer = ckpt("rm", f"{run_dir}@1", "--json")
    assert (answer.status, answer.data["verdict"], steps(run_dir)) == (0, "removed", [2])
    assert ckpt("verify", run_dir).status == 0


def test_rm_keeps_what_must_stay(run_dir: Path) -> None:
    """P60: the newest, pinned and leased checkpoints stay, each with its reason and exit status 1."""
    save_steps(run_dir, 1, 2, 3)
    ckpt("pin", f"{run_dir}@1", "-m", "the paper")
    run = open_run(run_dir)
    with run.lease(run.find(2), "an evaluation"):
        before = tree(run_dir)
        for step, reason in ((3, "newest, newest verified"), (2, "leased by an evaluation"), (1, "pinned: the paper")):
            for options in ((), ("--dry-run",)):
                answer = ckpt("rm", f"{run_dir}@{step}", *options)
                assert answer.status == 1
                assert f"It stays: {reason}." in answer.out
        assert {name for name in tree(run_dir) if not name.startswith("ledger")} == {
            name for name in before if not name.startswith("ledger")
        }
    assert steps(run_dir) == [3, 2, 1]


def test_rm_never_takes_the_last_good_one(run_dir: Path) -> None:
    """P60: where all newer checkpoints are damaged the newest good one stays, and where none is good all stay."""
    save_steps(run_dir, 1, 2, 3)
    flip(only(run_dir, "checkpoint_000000000003/*/model-*.safetensors"), -1)
    answer = ckpt("rm", f"{run_dir}@2")
    assert (answer.status, "It stays: newest verified." in answer.out) == (1, True)
    assert ckpt("rm", f"{run_dir}@1").status == 0
    flip(only(run_dir, "checkpoint_000000000002/*/model-*.safetensors"), -1)
    save_steps_of_copy = steps(run_dir)
    answer = ckpt("rm", f"{run_dir}@2", "--json")
    assert (answer.status, answer.data["error"]["type"]) == (1, "NoGoodCheckpointError")
    assert steps(run_dir) == save_steps_of_copy == [3, 2]
