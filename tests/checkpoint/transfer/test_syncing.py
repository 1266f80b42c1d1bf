"""A run at another store: the same checkpoints in the same order, whatever happened before, and nothing else."""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_tasks import open_run
from ckpt_tasks.errors import RunMismatchError, StateError
from ckpt_tasks.format.ledger import lineage
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import die
from tests.support.cli_runs import flip, tree
from tests.support.sweeps import quick_first
from tests.support.syncs import check, copy, opened, outcomes, prune, same, small, state_of, train

# ── what is copied ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_is_the_same_at_the_target(run_dir: Path, tmp_path: Path) -> None:
    """P52: checkpoints, lines that were left, evaluations, pins and what "best" means are the same, and all bytes."""
    train(run_dir, 1, 2, 3, best_metric="loss")
    with opened(run_dir) as ckpt:
        assert ckpt.restore(small(0), step=1) == 1
        ckpt.save(2, small(20), metrics={"loss": float("nan")})
        ckpt.pin(3, "the paper")
    run = open_run(str(run_dir))
    assert run.record_evaluation(run.find("latest"), "quick", {"accuracy": 0.5})
    report = copy(run, tmp_path / "b")
    assert [row.outcome for row in report.rows] == ["copied"] * 4
    assert (report.evaluations, report.pins, report.faults) == (1, 1, ())
    assert [c.abandoned for c in open_run(str(tmp_path / "b")).checkpoints()] == [False, False, True, True]
    check(tmp_path / "b", run)
    named = ("checkpoint_", "evals/")
    ours, theirs = (
        {name: data for name, data in tree(place).items() if name.startswith(named)}
        for place in (run_dir, tmp_path / "b")
    )
    assert ours == theirs


def test_the_next_copy_takes_what_is_new(run_dir: Path, tmp_path: Path) -> None:
    """What has not changed is copied once; a second copy writes nothing, a third one the new checkpoint alone."""
    run = train(run_dir, 1, 2, of=state_of)
    report = copy(run, tmp_path / "b")
    first, second = (row.copied_bytes for row in report.rows)
    assert first > 2 << 20
    assert second < 100_000
    before = tree(tmp_path / "b")
    assert outcomes(copy(run, tmp_path / "b")) == {1: "there already", 2: "there already"}
    assert tree(tmp_path / "b") == before
    train(run_dir, 3, of=state_of)
    run.record_evaluation(run.find(1), "quick", {"accuracy": 0.5})
    report = copy(run, tmp_path / "b")
    assert outcomes(report) == {1: "there already", 2: "there already", 3: "copied"}
    assert report.evaluations == 1
    assert sum(row.copied_bytes for row in report.rows) < 100_000
    assert sum(row.found_bytes for row in report.rows) == 0
    check(tmp_path / "b", run)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────


def test_another_run_is_refused(run_dir: Path, tmp_path: Path) -> None:
    """P52: a target that holds a run with another key is refused, and stays as it is."""
    train(tmp_path / "other", 1)
    before = tree(tmp_path / "other")
    with pytest.raises(RunMismatchError, match="holds the run 'other'"):
        copy(train(run_dir, 1), tmp_path / "other")
    assert tree(tmp_path / "other") == before


def test_a_target_that_went_its_own_way_is_refused(run_dir: Path, tmp_path: Path) -> None:
    """P52: a target with checkpoints that the source never had is refused and untouched, also when both went on."""
    run = train(run_dir, 1, 2)
    copy(run, tmp_path / "b")
    train(tmp_path / "b", 7, 8)
    train(run_dir, 3)
    before = tree(tmp_path / "b")
    with pytest.raises(RunMismatchError, match=r"never had \(steps 7, 8\)"):
        copy(run, tmp_path / "b")
    assert tree(tmp_path / "b") == before
    assert run.head().state.leases == ()


def test_what_went_on_elsewhere_comes_back(run_dir: Path, tmp_path: Path) -> None:
    """A copy that training went on from can be copied back to where it came from, and then the other way again."""
    run = train(run_dir, 1, 2)
    copy(run, tmp_path / "b")
    there = train(tmp_path / "b", 3, 4, max_num_checkpoints=2)
    assert outcomes(copy(there, run_dir)) == {3: "copied", 4: "copied"}
    assert [c.step for c in run.checkpoints()] == [4, 3, 2, 1]
    assert outcomes(copy(run, tmp_path / "b")) == {1: "pruned there", 2: "pruned there"} | dict.fromkeys(
        (3, 4), "there already"
    )
    assert verify_run_directory(run.history).good


def test_a_directory_that_was_copied_by_other_means(run_dir: Path, tmp_path: Path) -> None:
    """P52: a copy made by `cp -r` is brought up to date like one of ours, also when the source has pruned since."""
    run = train(run_dir, 1, 2, 3)
    shutil.copytree(run_dir, tmp_path / "b")
    train(run_dir, 4, max_num_checkpoints=2)
    assert outcomes(copy(run, tmp_path / "b")) == {3: "there already", 4: "copied"}
    assert [c.step for c in open_run(str(tmp_path / "b")).checkpoints()] == [4, 3, 2, 1]


def test_what_the_target_pruned_stays_pruned(run_dir: Path, tmp_path: Path) -> None:
    """P64: a name that was retired is not used again: the target keeps fewer than the source, and one is refused."""
    run = train(run_dir, 1, 2, 3)
    copy(run, tmp_path / "b")
    prune(tmp_path / "b", 1)
    for step in (4, 5):  # the second time only the note of the last copy knows of it
        train(run_dir, step)
        found = outcomes(copy(run, tmp_path / "b"))
        assert found == {n: "pruned there" if n < 3 else "copied" if n == step else "there already" for n in found}
    with pytest.raises(StateError, match="pruned it"):
        copy(run, tmp_path / "b", 2)
    assert [c.step for c in open_run(str(tmp_path / "b")).checkpoints()] == [5, 4, 3]


@pytest.mark.parametrize("ended", quick_first([True, False]))
def test_an_object_that_the_target_gave_up(run_dir: Path, tmp_path: Path, ended: bool) -> None:
    """P64: a checkpoint that shares an object with one that was pruned at the target comes if the pruner has ended.

    Of a pruner that was lost nobody knows whether it deletes the object late: the checkpoint is refused.
    """
    run = train(run_dir, 1, of=state_of)
    with opened(run_dir) as ckpt:
        ckpt.restore(state_of(0))
        ckpt.save(2, state_of(2, frozen=0.7))
    copy(run, tmp_path / "b")
    pruner = opened(tmp_path / "b", max_num_checkpoints=1)
    pruner.acquire()
    pruner.prune()
    if ended:
        pruner.close()
    else:
        die(pruner)
    with opened(run_dir) as ckpt:
        ckpt.restore(state_of(0), step=1)
        ckpt.save(3, state_of(3))  # with the object of step 1
        ckpt.save(4, state_of(4, frozen=0.9))
    report = copy(run, tmp_path / "b")
    expected = "copied" if ended else "refused"
    assert outcomes(report) == {1: "pruned there", 2: "there already", 3: expected, 4: "copied"}
    assert ended or "no name is used twice" in report.faults[0]
    assert [c.step for c in open_run(str(tmp_path / "b")).checkpoints()] == ([4, 3, 2] if ended else [4, 2])
    assert verify_run_directory(open_run(str(tmp_path / "b")).history).good


def test_a_source_that_lost_its_key(run_dir: Path, tmp_path: Path) -> None:
    """P49: where format.json is damaged the manifests say which run it is; where they disagree, nothing is copied."""
    run = train(run_dir, 1)
    flip(run_dir / "format.json", 20)
    lost = open_run(str(run_dir))
    assert lost.run_key is None
    copy(lost, tmp_path / "b")
    assert open_run(str(tmp_path / "b")).run_key == "run"
    History(LocalStore(tmp_path / "other")).create("other")
    shutil.copy(tmp_path / "other" / "format.json", run_dir)
    assert outcomes(copy(open_run(str(run_dir)), tmp_path / "c")) == {1: "damaged"}
    assert run.find(1)


# ── any history ──────────────────────────────────────────────────────────────────────────────────────────────

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(1, 3)),
        st.tuples(st.just("back"), st.integers(0, 9)),
        st.tuples(st.just("prune"), st.integers(1, 3)),
        st.tuples(st.just("copy"), st.none()),
        st.tuples(st.just("copy"), st.integers(0, 9)),
        st.tuples(st.just("prune there"), st.integers(1, 3)),
    ),
    min_size=3,
    max_size=9,
)


@settings(
    max_examples=settings().max_examples // 3,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS)
def test_whatever_happened_the_newest_is_the_newest(fast_dir: Path, steps: list[tuple[str, Any]]) -> None:
    """P52: after any saves, ways back, prunings and partial copies, a copy has the checkpoints in their order."""
    root = fast_dir / secrets.token_hex(4)
    run, target = train(root / "run", 1), root / "b"
    step = 1
    for what, value in [*steps, ("copy", None)]:
        live = sorted(run.checkpoints(), key=lambda c: c.n)
        if what == "save":
            with opened(root / "run") as ckpt:
                step = ckpt.restore(small(0)) + value
                ckpt.save(step, small(step))
        if what == "back":
            with opened(root / "run") as ckpt:
                step = ckpt.restore(small(0), step=live[value % len(live)].step) + 1
                ckpt.save(step, small(step))
        if what == "prune":
            prune(root / "run", value)
        if what == "copy" and value is None:
            copy(run, target)
        if what == "copy" and value is not None:
            with suppress(StateError):  # the target has had it and pruned it
                copy(run, target, live[value % len(live)].step)
        if what == "prune there" and target.exists():
            prune(target, value)
    there = open_run(str(target))
    assert verify_run_directory(there.history).good
    have = {c.manifest_digest: c for c in there.checkpoints()}
    pruned = {row.checkpoint.manifest_digest for row in copy(run, target).rows if row.outcome == "pruned there"}
    wanted = [same(c) for c in run.checkpoints() if c.manifest_digest not in pruned]
    shared = {c.manifest_digest for c in run.checkpoints()} & {*have}
    assert [same(c) for c in lineage(tuple(have.values())) if c.manifest_digest in shared] == wanted
    assert not wanted or lineage(tuple(have.values()))[0].manifest_digest == wanted[0]["manifest_digest"].strip("'")
    shutil.rmtree(root)


def test_one_checkpoint_and_then_all(run_dir: Path, tmp_path: Path) -> None:
    """The order of commits is the source's, also where a newer checkpoint came first and one has gone meanwhile."""
    run = train(run_dir, 1, 2, 3, 4)
    for step in (3, 2):
        assert outcomes(copy(run, tmp_path / "b", step)) == {step: "copied"}
    assert [c.step for c in open_run(str(tmp_path / "b")).checkpoints()] == [3, 2]
    train(run_dir, 5, max_num_checkpoints=3)  # 3, 4, 5
    copy(run, tmp_path / "b")
    there = open_run(str(tmp_path / "b"))
    assert [c.step for c in there.checkpoints()] == [5, 4, 3, 2]
    entries = there.head().next_n
    copy(run, tmp_path / "b")
    assert there.head().next_n == entries
    assert verify_run_directory(there.history).good
