"""Forks: what a new run has of the old one, how it came there, and that neither needs the other."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from ckpt_tasks.checkpoint.transfer.fork import plan_fork, run_fork, without_user
from ckpt_tasks.checkpoint.transfer.syncing import plan_sync, run_sync
from ckpt_tasks.checkpoint.transfer.transfer import Moved
from ckpt_tasks.errors import CkptError, ConfigError, IntegrityError, RunMismatchError, StateError
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import WrappedStore
from tests.support.cli_runs import tree
from tests.support.forks import NoLinks, fork, objects, run_of, states, train, two_steps


@pytest.fixture
def a(run_dir: Path) -> Path:
    return two_steps(run_dir)


@pytest.fixture
def b(tmp_path: Path) -> Path:
    return tmp_path / "b"


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


def test_the_ledger_says_where_a_fork_came_from(a: Path, b: Path, tmp_path: Path) -> None:
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
    run_sync(run_of(b), copied := LocalStore(tmp_path / "copy"), plan_sync(run_of(b), copied))
    fork(tmp_path / "copy", 3, tmp_path / "c", {"lr": 0.5})
    second = run_of(tmp_path / "c").head().state
    assert second.params == {"lr": 0.5, "warmup": 2}, "a copy knows as much, and parameters add up"
    assert second.origin is not None
    assert (second.origin.run_key, second.origin.params) == ("b", {"lr": 0.001, "warmup": 2})
    train(b, 5, {"lr": 0.001, "warmup": 2})
    assert all((one["origin"], one["params"]) == (state["origin"], state["params"]) for one in states(b))
    assert states(a)[-1]["origin"] is None


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


@pytest.mark.parametrize("why", ["the target is a run", "the target cannot be written", "a part is missing"])
def test_a_fork_that_fails_leaves_its_source_as_it_was(a: Path, b: Path, why: str) -> None:
    """Nothing is written into the source's ledger, neither a lease nor its end: all is checked before the lease."""
    place = b
    if why == "the target is a run":
        train(b, 1)
    elif why == "the target cannot be written":
        b.write_text("a file")
        place = b / "inside"
    else:
        next(a.glob("checkpoint_000000000003/*/model-*")).unlink()
    before = tree(a)
    with pytest.raises(CkptError):
        fork(a, 3, place, {"lr": 0.5})
    assert tree(a) == before


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


def test_an_address_in_the_ledger_has_no_secrets() -> None:
    """Who asks, and what stands behind the question mark, is not written down."""
    assert without_user("s3://key:secret@bucket/run?token=1#x") == "s3://bucket/run"
    assert without_user("s3://bucket/run") == "s3://bucket/run"
    assert without_user("/data/what?@home") == "/data/what?@home"
