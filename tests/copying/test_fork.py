"""Forks: what a new run has of the old one, how it came there, and that neither needs the other."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.copying.fork import plan_fork, run_fork, without_user
from ckpt_tasks.copying.syncing import plan_sync, run_sync
from ckpt_tasks.copying.transfer import Moved
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError, IntegrityError, RunMismatchError, StateError
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import WrappedStore
from ckpt_tasks.upkeep.upkeep import verify_run_directory
from tests.support.cli_runs import flip, only, tree
from tests.support.forks import fork, objects, run_of, states, train, two_steps


@pytest.fixture
def a(run_dir: Path) -> Path:
    return two_steps(run_dir)


@pytest.fixture
def b(tmp_path: Path) -> Path:
    return tmp_path / "b"


class NoLinks:
    """The system's calls on two file systems: a file of one can have no name on the other."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def link(self, old: Any, new: Any) -> None:
        if ".tmp-" not in str(old):  # a name within one directory
            raise OSError(18, "Invalid cross-device link")
        os.link(old, new)


def test_a_fork_on_one_file_system_has_the_same_files(a: Path, b: Path) -> None:
    """Nothing is copied: every object has a second name; the manifest, which names the run, and the ledger are new."""
    moved = fork(a, 3, b, {"lr": 0.001})
    of_step = {name: inode for name, inode in objects(a).items() if name.startswith("checkpoint_000000000003")}
    assert objects(b) == of_step
    assert len(of_step) > 2
    assert moved == Moved(linked_bytes=sum((b / name).stat().st_size for name in of_step))
    faults = verify_run_directory(run_of(b).history)
    assert faults.good
    assert faults.orphans == ()
    assert [c.step for c in run_of(b).checkpoints()] == [3]


def test_the_ledger_says_where_a_fork_came_from(a: Path, b: Path) -> None:
    """The first entry of a fork holds its source, what was changed, and all parameters; every later one does too."""
    fork(a, 3, b, {"lr": 0.001, "warmup": 2})
    source = run_of(a).find(3)
    (state,) = states(b)
    assert state["params"] == {"lr": 0.001, "warmup": 2}
    assert state["origin"] == {
        "url": str(a),
        "run_key": "run",
        "step": 3,
        "manifest_digest": source.manifest_digest,
        "identity": run_of(b).find(3).manifest_digest,
        "set": {"lr": 0.001, "warmup": 2},
        "params": {"lr": 0.02},
    }
    assert run_of(b).find(3).metrics == source.metrics
    assert state["owner"]["released"]
    assert state["owner"]["epoch"] > max(int(path.name[1:7]) for path in b.glob("checkpoint_*/*"))
    train(b, 5, {"lr": 0.001, "warmup": 2})
    assert all((one["origin"], one["params"]) == (state["origin"], state["params"]) for one in states(b))
    assert states(a)[-1]["origin"] is None


def test_a_fork_without_changes_trains_as_the_source_did(a: Path, b: Path, tmp_path: Path) -> None:
    """P73: training goes on from the checkpoint, bit for bit as it went on in the source."""
    fork(a, 3, b)
    shutil.copytree(a, tmp_path / "again")
    assert train(b, 6, {"lr": 0.02}) == train(tmp_path / "again", 6, {"lr": 0.02})
    assert train(b, 9, {"lr": 0.02}) == train(a, 9, {"lr": 0.02})


def test_the_source_may_be_pruned_and_deleted(a: Path, b: Path) -> None:
    """P65: names are each run's own: what the source gives up leaves the fork whole, and it trains on."""
    fork(a, 3, b)
    train(a, 7, {"lr": 0.02}, max_num_checkpoints=1)
    assert [c.step for c in run_of(a).checkpoints()] == [7]
    assert verify_run_directory(run_of(b).history).good
    shutil.rmtree(a)
    train(b, 5, {"lr": 0.02})
    train(b, 6, {"lr": 0.02}, max_num_checkpoints=1)
    assert [c.step for c in run_of(b).checkpoints()] == [6]
    faults = verify_run_directory(run_of(b).history)
    assert faults.good
    assert faults.orphans == ()
    assert not list(b.glob("checkpoint_000000000003"))


def test_pruning_a_fork_leaves_the_source_whole(a: Path, b: Path) -> None:
    """The other way round as well: the fork gives up the checkpoint that it began with, and the source keeps it."""
    fork(a, 3, b)
    train(b, 5, {"lr": 0.02}, max_num_checkpoints=1)
    assert [c.step for c in run_of(b).checkpoints()] == [5]
    assert verify_run_directory(run_of(a).history).good
    assert [c.step for c in run_of(a).checkpoints()] == [6, 3, 0]


def test_what_does_not_change_is_reused_over_a_fork(run_dir: Path, b: Path) -> None:
    """P65: objects that older checkpoints wrote come along under their names, and later saves reuse them."""
    params = {"frozen": 1 << 19}
    train(run_dir, 2, params)
    train(run_dir, 4, params)
    reused = run_of(run_dir).find(4).reuses
    assert reused
    fork(run_dir, 4, b)
    shutil.rmtree(run_dir)
    train(b, 6, params, max_num_checkpoints=1)
    saved = run_of(b).find(6)
    assert saved.reuses == reused
    assert [c.step for c in run_of(b).checkpoints()] == [6]
    assert (b / reused[0]).exists()
    assert verify_run_directory(run_of(b).history).good
    train(b, 7, params)


def test_what_cannot_be_linked_is_sent_verified(a: Path, b: Path) -> None:
    """Across file systems bytes are copied, each compared with its digest; an earlier try's are verified and kept."""
    target = LocalStore(b, calls=NoLinks())
    moved = fork(a, 3, target)
    assert moved == Moved(sent_bytes=sum((b / name).stat().st_size for name in objects(b)))
    assert not set(objects(b).values()) & set(objects(a).values())
    assert verify_run_directory(run_of(b).history).good


def test_an_object_with_other_bytes_is_not_replaced(a: Path, b: Path) -> None:
    """P31: half an object, or one with other bytes, lies under a name that is to come: an error, and it stays."""
    for place, cut in ((b, True), (b.parent / "c", False)):
        shard = only(a, "checkpoint_000000000003/*/model-*.safetensors")
        found = place / shard.relative_to(a)
        found.parent.mkdir(parents=True)
        found.write_bytes(shard.read_bytes()[: 100 if cut else None])
        if not cut:
            flip(found, found.stat().st_size - 1)
        before = found.read_bytes()
        with pytest.raises(StateError, match="nothing is replaced"):
            fork(a, 3, place)
        assert found.read_bytes() == before
        assert not [*place.glob("ledger/*")]
        found.unlink()
        fork(a, 3, place)
        assert verify_run_directory(run_of(place).history).good


def test_damage_is_met_where_bytes_are_sent(a: Path, b: Path) -> None:
    """P49: a flipped bit in the data is found on the way: there is no run, until the same fork brings the rest."""
    shard = only(a, "checkpoint_000000000003/*/model-*.safetensors")
    flip(shard, shard.stat().st_size - 1)
    with pytest.raises(IntegrityError):
        fork(a, 3, LocalStore(b, calls=NoLinks()))
    with pytest.raises(CheckpointNotFoundError):
        run_of(b)
    assert not (b / shard.relative_to(a)).exists()
    flip(shard, shard.stat().st_size - 1)
    assert fork(a, 3, LocalStore(b, calls=NoLinks())).found_bytes > 0
    assert verify_run_directory(run_of(b).history).good


@pytest.mark.parametrize("calls", [None, NoLinks()], ids=["linked", "sent"])
def test_a_fork_that_fails_takes_nothing_from_the_one_beside_it(a: Path, b: Path, calls: NoLinks | None) -> None:
    """P33: a fork fails at any look or write while the same fork beside it is about to commit: that one is whole."""
    for n in count(1):
        shutil.rmtree(b, ignore_errors=True)
        failing = FailsAt(b, n)
        with suppress(StateError):  # the other one got as far as its own entry
            fork(a, 3, Beside(LocalStore(b, calls=calls) if calls else LocalStore(b), a, failing))
        assert verify_run_directory(run_of(b).history).good, n
        if not failing.failed:
            break
    assert n > 2


class Beside(WrappedStore):
    """Let another fork run when all but the entry is there."""

    def __init__(self, inner: LocalStore, source: Path, other: WrappedStore):
        super().__init__(inner)
        self._source, self._other = source, other

    def put_if_absent(self, name: str, body: bytes) -> None:
        if name == ledger_name(0):
            with suppress(IntegrityError, StateError):
                fork(self._source, 3, self._other)
        super().put_if_absent(name, body)


class FailsAt(WrappedStore):
    """Refuse the n-th look at an object, or write of one, as damage does that is met only now."""

    def __init__(self, root: Path, n: int):
        super().__init__(LocalStore(root, calls=NoLinks()))
        self.failed, self._left = False, n

    def size(self, name: str) -> int:
        self._count(name)
        return super().size(name)

    def put_if_absent(self, name: str, body: bytes) -> None:
        self._count(name)
        super().put_if_absent(name, body)

    def _count(self, name: str) -> None:
        self._left -= 1
        if self._left == 0:
            self.failed = True
            raise IntegrityError("damaged on purpose", key=name)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: flip(path.parent / "manifest.json", 50),
        lambda path: flip(path.parent / "index.arrow", 100),
        lambda path: flip(path, 20),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: path.unlink(),
    ],
    ids=["manifest", "index", "header", "cut", "missing"],
)
def test_a_damaged_source_is_refused(a: Path, b: Path, harm: Callable[[Path], None]) -> None:
    """P48, P49: manifest, index, headers and sizes are checked before anything is written."""
    harm(only(a, "checkpoint_000000000003/*/model-*.safetensors"))
    with pytest.raises(Exception, match=r"manifest|index|header|bytes|no such") as caught:
        fork(a, 3, b)
    assert isinstance(caught.value, (IntegrityError, OSError))
    assert not b.exists()
    assert run_of(a).head().state.leases == ()


def test_a_place_that_holds_something_is_refused(a: Path, b: Path, tmp_path: Path) -> None:
    """A run, another fork, objects without a ledger, and a place within the source: nothing is written there."""
    train(b, 1)
    fork(a, 3, tmp_path / "c", {"lr": 0.5})
    (tmp_path / "d").mkdir()
    shutil.copytree(a / "checkpoint_000000000006", tmp_path / "d" / "checkpoint_000000000006")
    for place, says in (
        (b, "is a run already"),
        (tmp_path / "c", "forked from"),
        (tmp_path / "d", "other checkpoints"),
    ):
        before = tree(place)
        with pytest.raises(StateError, match=says):
            fork(a, 3, place, {"lr": 0.1})
        assert tree(place) == before
    with pytest.raises(ConfigError, match="not another place"):
        fork(a, 3, a / "inside")
    with pytest.raises(ConfigError, match="run's key"):
        fork(a, 3, tmp_path / "e", run_key="../up")


def test_the_same_fork_again_changes_nothing(a: Path, b: Path) -> None:
    """A fork that is there, and has not gone on, is found; another key for what was begun is refused."""
    fork(a, 3, b, {"lr": 0.5})
    before = tree(b)
    assert fork(a, 3, b, {"lr": 0.5}) == Moved(found_bytes=run_of(b).find(3).size_bytes)
    assert tree(b) == before
    with pytest.raises(RunMismatchError):
        fork(a, 3, b, {"lr": 0.5}, run_key="other")


@pytest.mark.parametrize("steps", [(3, 6), (3, 3)], ids=["of two checkpoints", "of one"])
def test_of_two_forks_to_one_place_one_wins(a: Path, b: Path, steps: tuple[int, int]) -> None:
    """P33: both plan, both bring their objects; one entry stands, and what the other one brought is orphaned."""
    started, errors = threading.Barrier(2), []

    def race(step: int) -> None:
        run, store = run_of(a), LocalStore(b)
        plan = plan_fork(run, run.find(step), store, {})
        started.wait()
        try:
            run_fork(run, store, plan)
        except StateError as error:
            errors.append(error)

    threads = [threading.Thread(target=race, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    (winner,) = run_of(b).checkpoints()
    assert verify_run_directory(run_of(b).history).good
    train(b, 8, {"lr": 0.02})
    train(b, 9, {"lr": 0.02})
    head = run_of(b).head()
    assert {name.split("/")[0] for name in objects(b)} == {f"checkpoint_{step:012d}" for step in (winner.step, 8, 9)}
    assert all(head.state.keeps(name) for name in objects(b))


def test_the_source_is_leased_while_a_fork_is_made(a: Path, b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P64: whoever prunes the source in the middle of it leaves the checkpoint, and takes it afterwards."""
    real = LocalStore.adopt

    def pruned_meanwhile(self: LocalStore, *what: Any) -> bool:
        train(a, 7, {"lr": 0.02}, max_num_checkpoints=1)
        assert [c.step for c in run_of(a).checkpoints()] == [7, 3]
        return real(self, *what)

    monkeypatch.setattr(LocalStore, "adopt", pruned_meanwhile)
    fork(a, 3, b)
    monkeypatch.undo()
    assert run_of(a).head().state.leases == ()
    train(a, 8, {"lr": 0.02}, max_num_checkpoints=1)
    assert [c.step for c in run_of(a).checkpoints()] == [8]
    assert verify_run_directory(run_of(b).history).good


def test_a_copy_knows_as_much(a: Path, b: Path, tmp_path: Path) -> None:
    """`ckpt sync` takes along where a run was forked from and with what its program is built."""
    fork(a, 3, b, {"lr": 0.5})
    source, target = run_of(b), LocalStore(tmp_path / "copy")
    run_sync(source, target, plan_sync(source, target))
    state = run_of(tmp_path / "copy").head().state
    assert (state.origin, state.params) == (source.head().state.origin, {"lr": 0.5})


def test_a_fork_of_a_fork_names_the_one_before(a: Path, b: Path, tmp_path: Path) -> None:
    """Parameters add up, and each fork names the run that it came from."""
    fork(a, 3, b, {"warmup": 9})
    fork(b, 3, tmp_path / "c", {"lr": 0.5})
    state = run_of(tmp_path / "c").head().state
    assert state.params == {"lr": 0.5, "warmup": 9}
    assert state.origin is not None
    assert (state.origin.run_key, state.origin.params) == ("b", {"lr": 0.02, "warmup": 9})


def test_an_address_in_the_ledger_has_no_secrets() -> None:
    """Who asks, and what stands behind the question mark, is not written down."""
    assert without_user("s3://key:secret@bucket/run?token=1#x") == "s3://bucket/run"
    assert without_user("s3://bucket/run") == "s3://bucket/run"
    assert without_user("/data/what?@home") == "/data/what?@home"


def test_forking_leaves_no_lease_where_it_fails(a: Path, b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a fork ends, the source is let go."""

    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStore, "adopt", full)
    with pytest.raises(OSError, match="No space"):
        fork(a, 3, b)
    assert run_of(a).head().state.leases == ()
