"""Copies of what is damaged, of what changes meanwhile, and interrupted copies: only good bytes are committed."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt_tasks import open_run
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.manifest import ObjectRecord
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store, WrappedStore
from ckpt_tasks.testing import FaultyStore
from tests.support.cli_runs import flip, only
from tests.support.syncs import Meanwhile, check, copy, opened, outcomes, train
from tests.support.systems import Hurried, running_on

# ── damage, and a source that changes ────────────────────────────────────────────────────────────────────────


def test_a_damaged_evaluation_is_left_out(run_dir: Path, tmp_path: Path) -> None:
    """P49: the table of an evaluation is verified like everything else."""
    run = train(run_dir, 1)
    run.record_evaluation(run.find(1), "quick", {"accuracy": 0.5})
    flip(only(run_dir, "evals/*"), 40)
    report = copy(run, tmp_path / "b")
    assert (report.evaluations, len(report.faults)) == (0, 1)
    assert report.faults[0].startswith("evaluation quick of step 1")
    flip(only(run_dir, "evals/*"), 40)
    assert copy(run, tmp_path / "b").evaluations == 1
    check(tmp_path / "b", run)


@pytest.mark.parametrize("verb", ["get", "read"])
def test_a_bit_that_changes_on_the_way_is_read_again(run_dir: Path, tmp_path: Path, verb: str) -> None:
    """P47: whatever was read wrong once is copied all the same, with its own bytes."""
    run = train(run_dir, 1)
    names = [name for name in LocalStore(run_dir).names("") if name.startswith("checkpoint_")]
    for n, name in enumerate(names):
        flaky = FaultyStore(LocalStore(run_dir))
        flip_once = flaky.on("flipped", verb=verb, name=f"{re.escape(name)}$", times=1)
        assert outcomes(copy(Run(History(flaky), "run"), tmp_path / str(n))) == {1: "copied"}
        assert flip_once.hits or (verb == "get") is name.endswith(".safetensors")
        check(tmp_path / str(n), run, leased=True)


def test_a_lease_that_is_ended_by_others(run_dir: Path, tmp_path: Path) -> None:
    """P64: what vanishes while it is copied, whatever the lease said, was pruned, and is not called damaged."""
    run = train(run_dir, 1, 2)

    def end_and_prune() -> None:
        event = {"kind": "lease", "step": 1, "holder": "nobody", "ended": True}
        run.history.append(event, lambda state, n: replace(state, leases=()), owner=None)
        with opened(run_dir, max_num_checkpoints=1) as ckpt:
            ckpt.acquire()
            ckpt.prune()

    report = copy(run, Meanwhile(LocalStore(tmp_path / "b"), end_and_prune))
    assert (outcomes(report), report.faults) == ({1: "pruned meanwhile", 2: "copied"}, ())
    check(tmp_path / "b", run)


def test_a_lease_is_renewed(run_dir: Path, tmp_path: Path) -> None:
    """P64: a copy that takes longer than a lease holds the checkpoint by one after the other, and none is left."""
    run = train(run_dir, 1)
    with running_on(Hurried(1e9)):
        copy(run, tmp_path / "b")
    events = [run.history.read_entry(n)[0].event for n in range(run.head().next_n)]
    leases = [event for event in events if event["kind"] == "lease"]
    assert len([event for event in leases if not event.get("ended")]) >= len(open_checkpoint_objects(run))
    check(tmp_path / "b", run)


def open_checkpoint_objects(run: Run) -> tuple[ObjectRecord, ...]:
    return open_checkpoint(run.history.store, run.find("latest")).manifest.objects


# ── interrupted ──────────────────────────────────────────────────────────────────────────────────────────────


class Slow(WrappedStore):
    """Break off the first part of the first object that has two, and let its second part come when `late` says so."""

    def __init__(self, inner: Store, late: threading.Event):
        super().__init__(inner)
        self.broken = ""
        self._late = late

    def read(self, name: str, begin: int, into: memoryview) -> None:
        if begin and not self.broken:
            self.broken = name
        if name != self.broken:
            super().read(name, begin, into)
        elif begin:
            self._late.wait(2)
            into[:] = bytes(into.nbytes)
        else:
            raise IntegrityError("cut", key=name)


def test_a_read_that_comes_late_spoils_nothing(run_dir: Path, tmp_path: Path) -> None:
    """P47: what is still being read of an object that was given up cannot land in the next one, which is verified."""
    train(run_dir, 1, 2, of=lambda step: {"x": {"w": torch.full((5 << 20,), float(step))}})
    late = threading.Event()
    slow = Slow(LocalStore(run_dir), late)

    def come() -> None:
        late.set()
        time.sleep(0.5)

    copy(Run(History(slow), "run"), Meanwhile(LocalStore(tmp_path / "b"), come))
    there = open_run(str(tmp_path / "b"))
    assert len(there.checkpoints()) == 1
    assert verify_run_directory(there.history).good
