"""A process that stalls between its decision and its deed, and wakes after others have gone on: nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt_tasks import open_run
from ckpt_tasks.checkpoint.transfer.syncing import SyncReport
from ckpt_tasks.errors import FencedError, StoreError
from ckpt_tasks.format.keys import parse_attempt
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store, WrappedStore
from tests.support.syncs import Full, check, copy, opened, outcomes, state_of, train


class Stalled(WrappedStore):
    """Let something happen before the first object of an attempt is deleted."""

    def __init__(self, inner: Store, what: Callable[[], object]):
        super().__init__(inner)
        self._what: Callable[[], object] | None = what

    def delete(self, name: str) -> None:
        if parse_attempt(name):
            what, self._what = self._what, None
            if what is not None:
                what()
        super().delete(name)


def test_a_stalled_pruner_deletes_nothing_that_a_later_copy_commits(run_dir: Path, tmp_path: Path) -> None:
    """P64, P67: a pruner stalls before it deletes what a killed copy left, and wakes after the next copy's end.

    What is on storage then, in the target's ledger and in the report, is the same: the copy saw what was given up.
    """
    run, target = train(run_dir, 1), tmp_path / "b"
    copy(run, target)
    train(run_dir, 2)
    with pytest.raises(StoreError, match="full"):
        copy(run, Full(LocalStore(target)))
    reports: list[SyncReport] = []

    def copy_again() -> None:
        owner = pruner.run.head().state.owner
        assert owner is not None
        event = {"kind": "owner", "because": "take_over was asked for", "pid": 1, "host": "other", "damaged": []}
        theirs = replace(owner, id="0" * 32, epoch=owner.epoch + 1, released=True)
        History(LocalStore(target)).append(event, lambda state, n: replace(state, owner=theirs), owner=None)
        reports.append(copy(run, target))

    pruner = opened(target)
    pruner.run.history.store = Stalled(LocalStore(target), copy_again)
    pruner.acquire()
    pruner.prune()
    with pytest.raises(FencedError):
        pruner.save(9, {"x": {"w": torch.zeros(1)}})
    pruner.close()
    there = open_run(str(target))
    assert verify_run_directory(there.history).good
    assert [outcomes(report) for report in reports] == [{1: "there already", 2: "refused"}]
    assert [c.step for c in there.checkpoints()] == [1]
    assert not [*target.glob("checkpoint_000000000002/*/*")]
    # The pruner may have had any name in its hands that it gave up: none of them comes back, whenever it is asked for.
    assert outcomes(copy(run, target)) == {1: "there already", 2: "refused"}
    train(run_dir, 3)
    with opened(target) as later:
        later.acquire()
        later.prune()  # nothing is in `retired` any more
    assert open_run(str(target)).head().state.retired == ()
    for _ in range(2):
        assert outcomes(copy(run, target))[2] == "refused"
    assert [c.step for c in there.checkpoints()] == [3, 1]
    assert verify_run_directory(there.history).good


def test_a_stalled_copy_changes_nothing_that_a_later_copy_commits(run_dir: Path, tmp_path: Path) -> None:
    """P67: a copy stalls before it puts an object, and wakes after another copy has committed the object."""
    run, target = train(run_dir, 1, of=state_of), tmp_path / "b"

    class Slow(WrappedStore):
        """Stall once, before the first shard is put. Refuse to delete or replace an object of an attempt."""

        stalled = False

        def put_if_absent(self, name: str, body: bytes) -> None:
            if name.endswith(".safetensors") and not self.stalled:
                self.stalled = True
                history = History(LocalStore(target))
                history.append({"kind": "release"}, lambda state, n: state.released(), owner=history.head().state.owner)
                copy(run, target)
            super().put_if_absent(name, body)

        def delete(self, name: str) -> None:
            assert parse_attempt(name) is None
            super().delete(name)

        def replace(self, name: str, body: bytes) -> None:
            assert parse_attempt(name) is None
            super().replace(name, body)

    slow = Slow(LocalStore(target))
    with pytest.raises((FencedError, StoreError)):
        copy(run, slow)
    assert slow.stalled
    assert verify_run_directory(open_run(str(target)).history).good
    check(target, run)
