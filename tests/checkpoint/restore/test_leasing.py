"""Leases that last as long as their reader reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.restore.leasing import leased
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.errors import CheckpointNotFoundError, CommitUncertainError, StoreError
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.system import System
from tests.support.systems import running_on
from tests.support.waiting import until

SHORT_S = 0.6


@pytest.fixture
def run(run_dir: Path) -> Run:
    """Return a run with checkpoints of the steps 1 and 2."""
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), run_key="read")) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"value": step})
    return open_run(str(run_dir))


class Pauses(System):
    """This machine, on which something happens in each of the first pauses of a thread, which take no time."""

    def __init__(self, *happens: Callable[[], object]):
        self.asked_s, self._happens = list[float | None](), [*happens]

    def event(self) -> threading.Event:
        return _Event(self.asked_s, self._happens)


class _Event(threading.Event):
    def __init__(self, asked_s: list[float | None], happens: list[Callable[[], object]]):
        super().__init__()
        self._asked_s, self._happens = asked_s, happens

    def wait(self, timeout: float | None = None) -> bool:
        self._asked_s.append(timeout)
        if not self._happens:
            return super().wait(timeout)
        self._happens.pop(0)()
        return False


class Dated(System):
    """This machine, whose clock of the day moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = super().time()

    def time(self) -> float:
        return self.now_s


def prune(run: Run) -> list[int]:
    config = CheckpointConfig(checkpoint_dir=run.history.store.url, run_key="read", max_num_checkpoints=1)
    with Checkpointer(config) as ckpt:
        ckpt.acquire()
        ckpt.prune()
    return [one.step for one in run.checkpoints()]


def test_a_reader_may_take_longer_than_a_lease(run: Run) -> None:
    """P64: a lease is renewed while its block runs, and given back with it; then the checkpoint may go."""
    with running_on(Dated()) as clock, leased(run, run.find(1), "a slow reader", SHORT_S):
        for _ in range(3):
            clock.now_s += 0.9 * SHORT_S
            until(lambda: run.head().state.leases[0].expires_at > clock.now_s + 0.9 * SHORT_S)
        assert prune(run) == [2, 1]
    assert run.head().state.leases == ()
    assert prune(run) == [2]


def test_a_lease_is_given_back_after_an_error(run: Run) -> None:
    """P64: whatever ends the block ends the lease."""
    with pytest.raises(KeyError), leased(run, run.find(1), "a reader"):
        raise KeyError("its own")
    assert run.head().state.leases == ()


def test_what_is_pruned_cannot_be_leased(run: Run) -> None:
    """P64: a lease that comes too late says so."""
    gone = run.find(1)
    prune(run)
    with pytest.raises(CheckpointNotFoundError, match="pruned"), leased(run, gone, "a late reader"):
        pytest.fail("the block of a lease that was not given")


def test_a_reader_whose_checkpoint_went_all_the_same_ends_well(run: Run) -> None:
    """Where a lease ran out (its process slept, say) and the checkpoint went, the thread ends and the block goes on."""
    gone = run.find(1)
    digests = frozenset({gone.manifest_digest})
    note = {"kind": "note", "note": "test"}
    pauses = Pauses(
        lambda: run.history.append(note, lambda state, n: state.retire(digests, (), frozenset()), owner=None)
    )
    with running_on(pauses), leased(run, gone, "a sleeper", 60.0):
        pass
    assert [one.step for one in run.checkpoints()] == [2]
    assert pauses.asked_s == [30.0]


class Full(LocalStore):
    """A store that fails each put-if-absent once it is told how."""

    failure: Exception | None = None

    def put_if_absent(self, name: str, body: bytes) -> None:
        if self.failure is not None:
            raise self.failure
        super().put_if_absent(name, body)


@pytest.mark.parametrize("failure", [StoreError("no room"), CommitUncertainError("who knows")])
def test_an_end_that_cannot_be_written_is_no_error(run: Run, failure: Exception) -> None:
    """P64: what was done under a lease is done, though its end cannot be recorded: the lease expires by itself."""
    store = Full(run.history.store.url)
    with leased(Run(History(store), "read"), run.find(1), "a reader"):
        store.failure = failure
    assert [one.holder for one in run.head().state.leases] == ["a reader"]


def test_a_lease_is_renewed_after_half_its_time_and_retried_soon(run: Run) -> None:
    """P64: while the store fails its thread tries again before the lease is over; the next one has its whole time."""
    store = Full(run.history.store.url)
    failures = [StoreError("no room"), CommitUncertainError("who knows"), None, None]
    pauses = Pauses(*(partial(setattr, store, "failure", failure) for failure in failures))
    before = run.head().next_n
    with running_on(pauses), leased(Run(History(store), "read"), run.find(1), "a reader", 60.0):
        pass
    assert pauses.asked_s == [30.0, 60 / 16, 60 / 16, 30.0, 30.0]
    assert run.head().next_n == before + 6  # three leases, and their ends
    assert run.head().state.leases == ()
