"""A copy is a run, by whichever way it was made: whole, verified, on its own, and complete after any interruption.

What counts as a good object on the way: every bit of it is covered by a digest that fits.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks import open_run
from ckpt_tasks.checkpoint.transfer.fork import plan_fork, run_fork
from ckpt_tasks.checkpoint.transfer.syncing import plan_sync, run_sync
from ckpt_tasks.checkpoint.transfer.transfer import Transfer, changes
from ckpt_tasks.errors import CkptError, ConfigError, ObjectNotFoundError, StateError, StoreError
from ckpt_tasks.format.keys import MAX_FOLDED
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.manifest import ObjectRecord
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.run.upkeep.verifying import orphans, verify_run_directory
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store, WrappedStore
from tests.support import syncs
from tests.support.calls import Mode
from tests.support.cli_runs import flip, only
from tests.support.forks import NoLinks, run_of, train
from tests.support.sweeps import KILLED_AFTER, LANDED, Victim, failing_calls, quick_first, strides, victim_of
from tests.support.syncs import Full, Meanwhile

Copy = Callable[[Path, Store, int], object]
PARAMS = {"frozen": 1 << 19}  # a part that both checkpoints share
FEWEST_CALLS = 40  # a sweep that ends before has not swept a whole copy


def sync(source: Path, target: Store, step: int) -> None:
    """Copy one checkpoint, and raise what kept it from being copied."""
    run = run_of(source)
    [row] = run_sync(run, target, plan_sync(run, target, run.find(step))).rows
    if row.fault is not None:
        raise StateError(row.fault)


def fork(source: Path, target: Store, step: int) -> None:
    run = run_of(source)
    run_fork(run, target, plan_fork(run, run.find(step), target, {}))


KINDS: dict[str, Copy] = {"sync": sync, "fork": fork}


@pytest.fixture(params=KINDS)
def copy(request: pytest.FixtureRequest) -> Copy:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def made(fast_dir: Path) -> Path:
    """Make a run with steps 2 and 4."""
    for step in (2, 4):
        train(fast_dir / "made" / "run", step, PARAMS)
    return fast_dir / "made"


@pytest.fixture
def root(made: Path) -> Iterator[Path]:
    """Return a directory with the run in `run`, and no `b` yet."""
    place = made.parent / secrets.token_hex(4)
    shutil.copytree(made, place)
    yield place
    shutil.rmtree(place)


def sent(root: Path) -> LocalStore:
    """Return a target on another file system, to which every byte is sent."""
    return LocalStore(root / "b", calls=NoLinks())


def committed(root: Path) -> list[int]:
    """Return the steps at the target, all of whose bytes are good."""
    if not [*(root / "b").glob("ledger/*.json")]:
        return []
    run = run_of(root / "b")
    assert verify_run_directory(run.history).good
    return [one.step for one in run.checkpoints()]


def check_whole(root: Path) -> None:
    """The copy has the checkpoint, and nothing that no checkpoint names; the source is let go."""
    assert committed(root) == [4]
    run = run_of(root / "b")
    assert orphans(run.history.store, run.head().state) == []
    assert run_of(root / "run").head().state.leases == ()


def test_it_trains_as_the_source_did_and_needs_it_no_more(root: Path, copy: Copy) -> None:
    """P65, P73: bit for bit as it went on in the source; neither loses what the other prunes, or deletes."""
    a, b = root / "run", root / "b"
    copy(a, LocalStore(b), 4)
    check_whole(root)
    reused = run_of(b).find(4).reuses
    assert reused == run_of(a).find(4).reuses != ()
    shutil.copytree(a, root / "again")
    assert train(b, 6, PARAMS, max_num_checkpoints=1) == train(root / "again", 6, PARAMS)
    assert committed(root) == [6]
    assert verify_run_directory(run_of(a).history).good
    train(a, 7, PARAMS, max_num_checkpoints=1)
    shutil.rmtree(a)
    assert committed(root) == [6]
    train(b, 8, PARAMS, max_num_checkpoints=1)
    assert committed(root) == [8]
    assert run_of(b).find(8).reuses == reused


HARMS: dict[str, Callable[[Path], object]] = {
    "manifest": lambda path: flip(path.parent / "manifest.json", 50),
    "index": lambda path: flip(path.parent / "index.arrow", 100),
    "header": lambda path: flip(path, 20),
    "values": lambda path: flip(path, -1),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("harm", quick_first(HARMS, 2))
def test_what_is_damaged_is_not_committed(root: Path, copy: Copy, harm: str) -> None:
    """P47, P48, P49: a changed byte of any object is found on the way; once it is mended the copy completes."""
    shard = only(root / "run", "checkpoint_000000000004/*/model-*.safetensors")
    shutil.copytree(shard.parent, root / "good")
    HARMS[harm](shard)
    with pytest.raises((CkptError, OSError), match=r"manifest|index|header|bytes|no such|digest"):
        copy(root / "run", sent(root), 4)
    assert committed(root) == []
    assert run_of(root / "run").head().state.leases == ()
    shutil.copytree(root / "good", shard.parent, dirs_exist_ok=True)
    copy(root / "run", sent(root), 4)
    check_whole(root)


@pytest.mark.parametrize("harm", ["cut", "values"])
def test_what_lies_there_is_verified_and_not_replaced(root: Path, copy: Copy, harm: str) -> None:
    """P31, P35: half an object, or one with other bytes, lies under a name that is to come: an error, and it stays."""
    shard = only(root / "run", "checkpoint_000000000004/*/model-*.safetensors")
    if copy is sync:
        with suppress(StoreError):
            copy(root / "run", Full(sent(root)), 4)
    shutil.copytree(shard.parent, (root / "b" / shard.relative_to(root / "run")).parent, dirs_exist_ok=True)
    only(root / "b", "checkpoint_000000000004/*/manifest.json").unlink()
    HARMS[harm](found := root / "b" / shard.relative_to(root / "run"))
    before = found.read_bytes()
    with pytest.raises(StateError, match="nothing is replaced"):
        copy(root / "run", sent(root), 4)
    assert found.read_bytes() == before
    assert committed(root) == []
    found.unlink()
    copy(root / "run", sent(root), 4)
    check_whole(root)


def test_an_object_that_is_put_and_is_not_there(root: Path, copy: Copy) -> None:
    """P35: a target that says "done" and has nothing gets no commit."""

    class Forgetful(WrappedStore):
        def put_if_absent(self, name: str, body: bytes) -> None:
            if not name.endswith(".safetensors"):
                super().put_if_absent(name, body)

    with pytest.raises(CkptError):
        copy(root / "run", Forgetful(sent(root)), 4)
    assert committed(root) == []


def test_the_source_keeps_what_is_being_copied(root: Path, copy: Copy) -> None:
    """P64: whoever prunes the source in the middle of a copy leaves the checkpoint, and takes it afterwards."""
    a, left = root / "run", list[list[int]]()

    def prune() -> None:
        train(a, 5 + len(left), PARAMS, max_num_checkpoints=1)
        left.append([one.step for one in run_of(a).checkpoints()])

    copy(a, Meanwhile(sent(root), prune), 2)
    prune()
    assert left == [[5, 2], [6]]
    assert committed(root) == [2]


@pytest.mark.parametrize("place", ["", "below", ".."])
def test_a_place_within_the_other_is_refused(root: Path, copy: Copy, place: str) -> None:
    """A run is not copied into itself, nor to a directory within it or around it."""
    before = sorted(root.rglob("*"))
    with pytest.raises(ConfigError, match="not another place"):
        copy(root / "run", LocalStore((root / "run" / place).resolve()), 4)
    assert sorted(root.rglob("*")) == before


# ── interrupted ──────────────────────────────────────────────────────────────────────────────────────────────────


@strides(19)
@pytest.mark.parametrize("mode", ["refused", LANDED])
def test_whatever_call_fails_the_same_copy_completes(made: Path, copy: Copy, mode: Mode, stride: int) -> None:
    """P28, P67: at every failed call at the target what is committed there is good, and the next copy completes it."""
    for calls in failing_calls(mode, stride, FEWEST_CALLS):
        root = made.parent / secrets.token_hex(4)
        shutil.copytree(made, root)
        with suppress(CkptError):
            copy(root / "run", LocalStore(root / "b", calls=calls), 4)
        assert committed(root) in ([], [4]), calls.where
        assert run_of(root / "run").head().state.leases == (), calls.where
        copy(root / "run", LocalStore(root / "b"), 4)
        check_whole(root)
        shutil.rmtree(root)


# It has one thread and no torch: a fork of it is a process like any other, and starts at once.
VICTIM = """
import os, sys
from ckpt_tasks.checkpoint.transfer.fork import plan_fork, run_fork
from ckpt_tasks.checkpoint.transfer.syncing import plan_sync, run_sync
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.storage.local import LocalStore
from tests.support.calls import FailingCalls

for line in sys.stdin:
    root, kind, n, mode = line.rstrip().split("\t")
    child = os.fork()
    if child == 0:
        run, store = open_run(root + "/run"), LocalStore(root + "/b", calls=FailingCalls(int(n), mode))
        if kind == "sync":
            run_sync(run, store, plan_sync(run, store, run.find(4)))
        else:
            run_fork(run, store, plan_fork(run, run.find(4), store, {}))
        os._exit(0)
    print("killed" if os.WIFSIGNALED(os.waitpid(child, 0)[1]) else "done", flush=True)
"""


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    with victim_of("-c", VICTIM) as victim:
        yield victim


@strides(19)
@pytest.mark.parametrize("mode", ["killed before", KILLED_AFTER])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_call_only_orphans_are_left(
    made: Path, victim: Victim, kind: str, mode: Mode, stride: int
) -> None:
    """P30, P67: after SIGKILL at any call what is committed is good, the rest is orphaned, and a copy completes it."""
    for n in victim.deaths(stride, FEWEST_CALLS):
        root = made.parent / secrets.token_hex(4)
        shutil.copytree(made, root)
        victim.strike(root, kind, n, mode)
        assert committed(root) in ([], [4])
        KINDS[kind](root / "run", LocalStore(root / "b"), 4)
        assert committed(root) == [4]
        run = open_run(root / "b")
        assert orphans(run.history.store, run.head().state) == []
        shutil.rmtree(root)


# ── one object ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def shard(fast_dir: Path) -> tuple[ObjectRecord, Any, bytes]:
    """Return one shard: its record, its rows and its bytes."""
    run = syncs.train(fast_dir / "shard", 1)
    found = open_checkpoint(run.history.store, run.find(1))
    (record,) = (record for record in found.manifest.objects if "/x-" in record.name)
    rows = [row for row in found.rows if row.object == record.name]
    return record, rows, run.history.store.get(record.name, 1 << 20)


@given(at=st.integers(0), bit=st.integers(0, 7))
def test_any_changed_bit_is_a_change(shard: tuple[ObjectRecord, Any, bytes], at: int, bit: int) -> None:
    """P47: whatever bit of an object is turned, its header's included, it is not what was written."""
    record, rows, data = shard
    assert changes(record, rows, memoryview(data)) == []
    turned = bytearray(data)
    turned[at % len(data)] ^= 1 << bit
    assert changes(record, rows, memoryview(turned))


def test_bytes_without_a_digest_are_no_good(shard: tuple[ObjectRecord, Any, bytes]) -> None:
    """P47: an object of which a part has no digest cannot be verified, and is not copied."""
    record, rows, data = shard
    (fault,) = changes(record, rows[:-1], memoryview(data))
    assert "have no digest" in fault


def test_a_folded_name_that_was_given_up(fast_dir: Path) -> None:
    """MUST 8: an object of any rank that the target's ledger or its notes give up in one name is refused."""
    folded = f"checkpoint_000000000001/e000001-00000000000000aa/x-[0-{MAX_FOLDED - 1}]-of-09999999-{{}}.safetensors"
    state, store = State(retired=(folded.format(0),)), LocalStore(fast_dir / "given up")
    with Transfer(store, store, state, lambda size_bytes: None, frozenset({folded.format(1)})) as transfer:
        for part, error in ((0, StateError), (1, StateError), (2, ObjectNotFoundError)):
            name = folded.format(part).replace(f"[0-{MAX_FOLDED - 1}]", "00007")
            with pytest.raises(error):
                transfer.bring(ObjectRecord(name, 1, "00" * 16, 1), ())
