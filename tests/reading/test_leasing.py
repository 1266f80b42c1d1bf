"""Leases that last as long as their reader reads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import CheckpointNotFoundError, CommitUncertainError, StoreError
from ckpt_tasks.ledger.history import History
from ckpt_tasks.reading.leasing import leased
from ckpt_tasks.reading.reading import Run
from ckpt_tasks.storage.local import LocalStore

SHORT_S = 0.6


@pytest.fixture
def run(run_dir: Path) -> Run:
    """Return a run with checkpoints of the steps 1 and 2."""
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), run_key="read")) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"value": step})
    return open_run(str(run_dir))


def prune(run: Run) -> list[int]:
    config = CheckpointConfig(checkpoint_dir=run.history.store.url, run_key="read", max_num_checkpoints=1)
    with Checkpointer(config) as ckpt:
        ckpt.acquire()
        ckpt.prune()
    return [one.step for one in run.checkpoints()]


def test_a_reader_may_take_longer_than_a_lease(run: Run) -> None:
    """P64: a lease is renewed while its block runs, and given back with it; then the checkpoint may go."""
    with leased(run, run.find(1), "a slow reader", SHORT_S):
        time.sleep(2 * SHORT_S)
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
    with leased(run, gone, "a sleeper", SHORT_S):
        run.history.append(
            {"kind": "note", "note": "test"},
            lambda state, n: state.retire(frozenset({gone.manifest_digest}), (), frozenset()),
            owner=None,
        )
        time.sleep(SHORT_S)
    assert [one.step for one in run.checkpoints()] == [2]


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
