"""A ledger that is damaged or lost: never a silent start from nothing, and nothing is deleted for it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.errors import NoGoodCheckpointError
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.upkeep.verifying import verify_checkpoint
from ckpt_tasks.storage.local import LocalStore
from tests.support import syncs
from tests.support.runs import UNTOUCHED, fingerprint, head_of, on_disk, opened, restored, state_of, train
from tests.support.sweeps import quick_first


@pytest.fixture
def root(fast_dir: Path) -> Path:
    """Make a run of one process that saved steps 1, 2, 3: entries owner, three commits, release."""
    made = fast_dir / "run"
    shutil.rmtree(made, ignore_errors=True)
    train(made, 1, 2, 3, max_num_checkpoints=None)
    return made


def entries(root: Path) -> list[Path]:
    """List the ledger's files, oldest entry first."""
    return sorted((root / "ledger").iterdir(), reverse=True)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def delete_all(root: Path) -> None:
    shutil.rmtree(root / "ledger")


def zero_all(root: Path) -> None:
    for path in entries(root):
        zero(path)


def zero_commits(root: Path) -> None:
    for path in entries(root)[1:]:
        zero(path)


@pytest.mark.parametrize("harm", quick_first([delete_all, zero_all, zero_commits], 2))
def test_a_lost_ledger_is_never_taken_for_a_new_run(root: Path, harm: Callable[[Path], None]) -> None:
    """P35, P49, P60: restore and save say what is lost, again and again, as a retry would ask; no object is touched."""
    harm(root)
    before = on_disk(root)
    for _ in range(3):
        ckpt = opened(root)
        target = state_of(UNTOUCHED)
        with pytest.raises(NoGoodCheckpointError):
            ckpt.restore(target)
        with pytest.raises(NoGoodCheckpointError):
            ckpt.save(4, state_of(4))
        ckpt.close()
        assert fingerprint(target) == fingerprint(state_of(UNTOUCHED))
    assert on_disk(root) == before


def test_entries_lost_at_the_end_are_named_and_the_older_state_is_used(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """P35, P49: when a power loss zeroed the last entries, the restore goes on from the one before, and warns once.

    It names the entries and the lost step; after the next save nothing is damaged.
    """
    lost = [f"ledger/{path.name}" for path in entries(root)[-2:]]
    for name in lost:
        zero(root / name)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        step, ckpt = restored(root)
        ckpt.checkpoints()
    assert step == 2
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert all(words in said for words in (*lost, "entry 2", "steps 3."))
    [note] = open_run(str(root)).notes()
    assert note["note"] == "fallback"
    assert ckpt.last_restore is not None
    assert {*note["damaged"]} == {*ckpt.last_restore.damaged} == {*lost}
    ckpt.save(5, state_of(5))
    ckpt.close()
    step, ckpt = restored(root)
    assert (step, ckpt.last_restore and ckpt.last_restore.damaged) == (5, ())
    ckpt.close()


def lease(root: Path) -> None:
    run = open_run(str(root))
    with run.lease(run.find("latest"), "somebody"):
        pass


def evaluate(root: Path) -> None:
    run = open_run(str(root))
    assert run.record_evaluation(run.find("latest"), "quick", {"loss": 1.0})


def own(root: Path) -> None:
    _, ckpt = restored(root)
    ckpt.close()


def note(root: Path) -> None:
    """Append as the owner does, without having read the damaged entry."""
    history = History(LocalStore(root))
    history.append({"kind": "note", "note": "x"}, lambda state, n: state, owner=history.head().state.owner)


@pytest.mark.parametrize("event", quick_first([own, lease, note, evaluate], 2))
@pytest.mark.parametrize("lost", quick_first([2, 1]))
def test_whatever_is_appended_above_a_damaged_entry_spares_what_that_named(
    root: Path, event: Callable[[Path], None], lost: int
) -> None:
    """P35, P65: no later owner deletes the checkpoint that only a damaged entry listed, whoever came between them."""
    third = next(c for c in head_of(root).live if c.step == 3)
    entries(root)[-1].unlink()  # the release: the process was killed
    for path in entries(root)[-lost:]:
        zero(path)
    event(root)
    for step in (5, 6, 7):
        _, ckpt = restored(root)
        ckpt.save(step, state_of(step))
        ckpt.prune()
        ckpt.close()
    assert 3 not in [c.step for c in head_of(root).live]
    assert verify_checkpoint(LocalStore(root), third) == []


@pytest.mark.parametrize("unreadable", [False, True])
def test_what_a_lost_checkpoint_reuses_is_not_deleted_with_the_checkpoint_that_wrote_it(
    run_dir: Path, unreadable: bool
) -> None:
    """P64, P65: a base that is stored once stays while a checkpoint uses it that only a damaged entry listed.

    One whose manifest is damaged too, which nobody can restore, keeps no prune from its work.
    """
    syncs.train(run_dir, 1, 2, of=syncs.state_of)
    second = next(c for c in head_of(run_dir).live if c.step == 2)
    assert second.reuses
    for path in (*entries(run_dir)[-2:], *([run_dir / second.manifest] if unreadable else [])):
        zero(path)
    for step in (5, 6, 7):
        syncs.train(run_dir, step, of=lambda step: syncs.state_of(step, frozen=float(step)), max_num_checkpoints=1)
    assert [c.step for c in head_of(run_dir).live] == [7]
    if not unreadable:
        assert verify_checkpoint(LocalStore(run_dir), second) == []
        # Three of step 7, two of step 2, its base.
        assert len(list(run_dir.glob("checkpoint_*/*/*.safetensors"))) == 6


@pytest.mark.parametrize("which", quick_first(range(5), 2))
def test_one_damaged_entry_never_loses_more_than_itself(root: Path, which: int) -> None:
    """P49: whichever single entry is damaged, the newest checkpoint that a good entry names is restored exactly."""
    zero(entries(root)[which])
    step, ckpt = restored(root)
    assert step == 3  # the last entry is a release: each other one stands below a good one
    ckpt.close()


def test_an_empty_directory_is_a_new_run(fast_dir: Path) -> None:
    """A directory that exists and is empty, or holds only other things, begins at step 0."""
    made = fast_dir / "empty"
    made.mkdir()
    (made / "notes.txt").write_text("mine")
    (made / "ledger").mkdir()
    ckpt = opened(made)
    assert ckpt.restore(state_of(1)) == 0
    ckpt.close()
