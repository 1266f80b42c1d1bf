"""`ckpt restore-drill`: what it records, what `ckpt ls` and the doctor make of it, and that it disturbs no training."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.cli.doctor.host import check_place
from ckpt_tasks.flows.session.local_session import LocalSession
from tests.support.cli_runs import ckpt, flip

PROGRAM = "tests.support.tiny:Tiny"


def config(run_dir: Path) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None, max_num_checkpoints=None)


@pytest.fixture
def run(run_dir: Path) -> Path:
    """A run of three steps, which names its program."""
    with Checkpointer(config(run_dir)) as opened:
        session = LocalSession(opened, PROGRAM, {"width": 16})
        session.restore()
        session.run(3)
        session.save(3)
    return run_dir


def damage(run_dir: Path) -> None:
    shard = next(run_dir.glob("checkpoint_000000000003/*/model-*.safetensors"))
    shard.chmod(0o644)
    flip(shard, -1)


def doctors(run_dir: Path) -> tuple[str, str]:
    [check] = [check for check in check_place(str(run_dir)) if check.name == "restore drill"]
    return check.verdict, check.seen


def test_a_drill_is_shown_with_its_seconds_or_its_fault(run: Path, request: pytest.FixtureRequest) -> None:
    """The program is the run's, with its parameters; ls, the doctor and --json say which step took how long, where.

    A damaged checkpoint fails it: the exit status is 1, the fault names what is damaged, and the last good drill stays;
    a good one ends it.
    """
    assert doctors(run)[0] == "not checked"
    assert ckpt("ls", run, "--json").data["checks"] == []
    done = ckpt("restore-drill", run, "--json")
    assert done.status == 0, done.err
    assert (done.data["good"], done.data["figures"]["step"], done.data["fault"]) == (True, 3, None)
    assert done.data["figures"]["restore_s"] > 0
    assert done.data["figures"]["start_s"] > 0.1, "torch was imported in a process of its own"
    verdict, seen = doctors(run)
    assert verdict == "ok"
    assert seen.startswith("A restore drill of step 3 took ")
    assert seen.rpartition(", ")[0] in ckpt("ls", run).out.replace("\n", " ")  # The rest is how long ago.
    [drill] = ckpt("ls", run, "--json").data["checks"]
    assert drill.items() <= done.data.items()

    request.getfixturevalue("forked")
    damage(run)
    failed = ckpt("restore-drill", run, "--json")
    assert failed.status == 1
    assert "IntegrityError" in failed.data["fault"]
    assert failed.data["figures"] == {"step": 3, "ranks": 1}
    verdict, seen = doctors(run)
    assert verdict == "wrong"
    assert "IntegrityError" in seen
    assert "took" in seen
    assert [one["fault"] is None for one in ckpt("ls", run, "--json").data["checks"]] == [True, False]
    damage(run)  # The same bit again.
    assert ckpt("restore-drill", f"{run}@3").status == 0
    assert doctors(run)[0] == "ok"


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_program_that_does_not_fit_fails_the_drill(run: Path) -> None:
    """A program with other tensors could not go on with this run; one that is misspelled is an error, not a drill."""
    other = ckpt("restore-drill", run, "--program", "tests.support.tiny:wider", "--json")
    assert other.status == 1
    assert "StateMismatchError" in other.data["fault"]
    assert doctors(run)[0] == "wrong"
    before = len(open_run(str(run)).notes())
    misspelled = ckpt("restore-drill", run, "--program", "tests.support.tiny:Tinny")
    assert misspelled.status != 0
    assert "Tinny" in misspelled.err
    assert len(open_run(str(run)).notes()) == before


@pytest.mark.usefixtures("forked")
def test_a_drill_owns_nothing_and_disturbs_no_training(run: Path) -> None:
    """Training that is under way keeps the run through a drill: same owner, no warning, and its next commits follow."""
    with Checkpointer(config(run)) as opened:
        session = LocalSession(opened, PROGRAM, {"width": 16})
        session.restore()
        session.run(4)
        session.save(4)
        owner = opened.run.head().state.owner
        assert ckpt("restore-drill", run, "--json").data["figures"]["step"] == 4
        session.run(6)
        session.save(6)
        state = opened.run.head().state
        assert state.owner == owner
        assert [one.step for one in opened.checkpoints()] == [6, 4, 3, 0]
        assert [(one.kind, one.figures["step"]) for one in state.checks] == [("drill", 4)]
        assert state.leases == ()
