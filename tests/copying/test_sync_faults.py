"""Copies of what is damaged, of what changes meanwhile, and interrupted copies: only good bytes are committed."""

from __future__ import annotations

import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt_tasks import open_run
from ckpt_tasks.errors import CkptError, IntegrityError, StoreError
from ckpt_tasks.format.keys import parse_attempt
from ckpt_tasks.format.manifest import ObjectRecord
from ckpt_tasks.ledger.history import History
from ckpt_tasks.reading.opening import open_checkpoint
from ckpt_tasks.reading.reading import Run
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store, WrappedStore
from ckpt_tasks.testing import FaultyStore
from ckpt_tasks.upkeep.upkeep import orphans, verify_run_directory
from tests.support.calls import Mode
from tests.support.cli_runs import flip, only
from tests.support.sweeps import KILLED_AFTER, LANDED, Victim, failing_calls, strides, victim_of
from tests.support.syncs import Full, check, copy, opened, outcomes, state_of, train
from tests.support.systems import Hurried, running_on

FEWEST_CALLS = 60  # a sweep that ends before has not swept a whole copy

# It has one thread and no torch: a fork of it is a process like any other, and starts at once.
VICTIM = """
import os, sys
from pathlib import Path
from ckpt_tasks.reading.reading import open_run
from ckpt_tasks.copying.syncing import plan_sync, run_sync
from ckpt_tasks.storage.local import LocalStore
from tests.support.calls import FailingCalls

for line in sys.stdin:
    root, n, mode = line.rstrip().split("\t")
    child = os.fork()
    if child == 0:
        run, store = open_run(root + "/run"), LocalStore(root + "/b", calls=FailingCalls(int(n), mode))
        run_sync(run, store, plan_sync(run, store))
        os._exit(0)
    print("killed" if os.WIFSIGNALED(os.waitpid(child, 0)[1]) else "done", flush=True)
"""


# ── damage, and a source that changes ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["manifest.json", "index.arrow", "x-*.safetensors"])
def test_what_is_damaged_is_left_out(run_dir: Path, tmp_path: Path, name: str) -> None:
    """P47, P49: a changed byte of any object keeps that checkpoint from being committed; the others are copied."""
    run = train(run_dir, 1, 2, 3)
    path = only(run_dir, f"checkpoint_000000000002/*/{name}")
    flip(path, path.stat().st_size - 1)
    report = copy(run, tmp_path / "b")
    assert outcomes(report) == {1: "copied", 2: "damaged", 3: "copied"}
    (fault,) = report.faults
    assert fault.startswith("step 2: ")
    there = open_run(str(tmp_path / "b"))
    assert [c.step for c in there.checkpoints()] == [3, 1]
    assert verify_run_directory(there.history).good
    kinds = [there.history.read_entry(n)[0].event["kind"] for n in range(there.head().next_n)]
    copy(run, tmp_path / "b")
    again = [there.history.read_entry(n)[0].event["kind"] for n in range(len(kinds), there.head().next_n)]
    assert "commit" not in again  # nothing came before the ones that are there
    flip(path, path.stat().st_size - 1)
    assert outcomes(copy(run, tmp_path / "b"))[2] == "copied"
    check(tmp_path / "b", run)


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


def test_an_object_that_is_put_and_is_not_there(run_dir: Path, tmp_path: Path) -> None:
    """P35: a target that says "done" and has nothing gets no commit."""

    class Forgetful(WrappedStore):
        def put_if_absent(self, name: str, body: bytes) -> None:
            if not name.endswith(".safetensors"):
                super().put_if_absent(name, body)

    with pytest.raises(StoreError, match="does not have the object"):
        copy(train(run_dir, 1), Forgetful(LocalStore(tmp_path / "b")))
    assert open_run(str(tmp_path / "b")).checkpoints() == []


class Meanwhile(WrappedStore):
    """Do something once, when the first shard is put."""

    def __init__(self, inner: Store, what: Callable[[], object]):
        super().__init__(inner)
        self._what: Callable[[], object] | None = what

    def put_if_absent(self, name: str, body: bytes) -> None:
        if name.endswith(".safetensors") and self._what is not None:
            what, self._what = self._what, None
            what()
        super().put_if_absent(name, body)


def test_the_source_keeps_what_is_being_copied(run_dir: Path, tmp_path: Path) -> None:
    """P64: the owner's pruning leaves a checkpoint alone while it is copied; those whose turn has not come go."""
    run = train(run_dir, 1, 2, 3, 4)

    def prune() -> None:
        with opened(run_dir, max_num_checkpoints=1) as ckpt:
            ckpt.acquire()
            ckpt.prune()

    report = copy(run, Meanwhile(LocalStore(tmp_path / "b"), prune))
    assert outcomes(report) == {1: "copied", 2: "pruned meanwhile", 3: "pruned meanwhile", 4: "copied"}
    assert report.faults == ()
    assert [c.step for c in run.checkpoints()] == [4, 1]
    check(tmp_path / "b", run)


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


def test_new_checkpoints_during_a_copy_wait_for_the_next(run_dir: Path, tmp_path: Path) -> None:
    """The source may be training: what it commits meanwhile comes with the next copy."""
    run = train(run_dir, 1, 2)
    assert outcomes(copy(run, Meanwhile(LocalStore(tmp_path / "b"), lambda: train(run_dir, 3)))) == {
        1: "copied",
        2: "copied",
    }
    assert outcomes(copy(run, tmp_path / "b"))[3] == "copied"
    check(tmp_path / "b", run)


# ── interrupted ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("harm", ["cut", "flipped", "zeroed"])
def test_what_lies_there_is_verified(run_dir: Path, tmp_path: Path, harm: str) -> None:
    """P35, P67: whole objects that lie there are used. Others are an error and stay: a copy replaces nothing."""
    run = train(run_dir, 1, of=state_of)
    with opened(tmp_path / "b", run_key="run") as ckpt:
        ckpt.acquire()
        ckpt.note("nothing yet")
    shutil.copytree(run_dir / "checkpoint_000000000001", tmp_path / "b" / "checkpoint_000000000001")
    only(tmp_path / "b", "checkpoint_*/*/manifest.json").unlink()
    shard = max((tmp_path / "b").glob("checkpoint_*/*/model-*"), key=lambda path: path.stat().st_size)
    data = shard.read_bytes()
    if harm == "flipped":
        flip(shard, len(data) - 1)
    else:
        shard.write_bytes(data[:-5] if harm == "cut" else bytes(len(data)))
    before = shard.read_bytes()
    (row,) = copy(run, tmp_path / "b").rows
    assert row.outcome == "refused"
    assert "nothing is replaced" in str(row.fault)
    assert shard.read_bytes() == before
    assert open_run(str(tmp_path / "b")).checkpoints() == []
    with opened(tmp_path / "b", run_key="run") as ckpt:
        ckpt.acquire()
        ckpt.prune()  # no checkpoint names it
    (row,) = copy(run, tmp_path / "b").rows
    assert row.outcome == "copied"
    check(tmp_path / "b", run)


@pytest.fixture(scope="module")
def base(fast_dir: Path) -> Path:
    """Make a run with an evaluation, a pin and a shared object, and a copy of its first checkpoint."""
    root = fast_dir / "base"
    run = train(root / "run", 1, 2, of=state_of)
    with opened(root / "run") as ckpt:
        ckpt.acquire()
        ckpt.pin(2, "kept")
    run.record_evaluation(run.find(2), "quick", {"accuracy": 0.5})
    copy(run, root / "b", 2)
    return root


def place_of(base: Path) -> Path:
    root = base.parent / secrets.token_hex(4)
    shutil.copytree(base, root)
    return root


@strides(9)
@pytest.mark.parametrize("mode", ["refused", LANDED])
def test_whatever_call_fails_the_same_copy_completes(base: Path, mode: Mode, stride: int) -> None:
    """P28, P67: at every failed call at the target what is committed there is good, and the next copy completes it."""
    for calls in failing_calls(mode, stride, FEWEST_CALLS):
        root = place_of(base)
        run = open_run(str(root / "run"))
        try:
            copy(run, LocalStore(root / "b", calls=calls))
        except CkptError:
            pass
        else:  # what fails beside the data (a sign of life, the release) is not a failure of the copy
            whole = calls.where.startswith("link ") and mode == "landed"  # the name is there: nothing has failed
            assert whole or "/checkpoint_" not in calls.where or calls.where.startswith("unlink "), calls.where
        there = open_run(str(root / "b"))
        assert verify_run_directory(there.history).good, calls.where
        assert run.head().state.leases == (), calls.where
        copy(run, root / "b")
        check(root / "b", run)
        assert orphans(there.history.store, there.head().state) == []
        shutil.rmtree(root)


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    with victim_of("-c", VICTIM) as victim:
        yield victim


@strides(9)
@pytest.mark.parametrize("mode", ["killed before", KILLED_AFTER])
def test_killed_at_any_call_only_orphans_are_left(base: Path, victim: Victim, mode: Mode, stride: int) -> None:
    """P30, P67: after SIGKILL at any call what is committed is good, the rest is orphaned, and a copy completes it."""
    for n in victim.deaths(stride, FEWEST_CALLS):
        root = place_of(base)
        ended = victim.strike(root, n, mode)
        run, there = open_run(str(root / "run")), open_run(str(root / "b"))
        state, store = there.head().state, there.history.store
        assert verify_run_directory(there.history).good
        unnamed = [name for name in store.names("") if parse_attempt(name) and not state.keeps(name)]
        assert unnamed == orphans(store, state)
        copy(run, root / "b")
        check(root / "b", run, leased=ended == "killed")
        assert orphans(store, there.head().state) == []
        shutil.rmtree(root)


def test_what_a_copy_left_is_orphaned(run_dir: Path, tmp_path: Path) -> None:
    """P67: after a copy that failed, what it put counts as orphaned, and the target's next owner deletes it."""
    train(run_dir, 1)
    run = train(run_dir, 2)  # by owner epoch 2

    with pytest.raises(StoreError, match="full"):
        copy(run, Full(LocalStore(tmp_path / "b")), 2)
    there = open_run(str(tmp_path / "b"))
    left = orphans(there.history.store, there.head().state)
    assert left
    assert left == [name for name in there.history.store.names("") if parse_attempt(name)]
    with opened(tmp_path / "b") as ckpt:
        ckpt.acquire()
        ckpt.prune()
    assert not [*(tmp_path / "b").glob("checkpoint_*")]
    assert outcomes(copy(run, tmp_path / "b")) == {1: "copied", 2: "copied"}
    check(tmp_path / "b", run)
