"""Pruning: what counts as left over, what stays although the plan said otherwise, and in which order things go."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.format.keys import Attempt, attempt_prefix, ledger_name
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.policy.retention import RetentionPolicy, Verdict
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.upkeep.retiring import Retirement, retire
from ckpt_tasks.run.upkeep.verifying import orphans, plan_prune, verify_run_directory
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import WrappedStore
from ckpt_tasks.testing import die
from tests.support.calls import WatchedCalls
from tests.support.ledgers import made, owner_of, steps
from tests.support.runs import opened, prefix_of, state_of

KEEP_ONE = RetentionPolicy(max_num_checkpoints=1)


def put_attempt(store: LocalStore, step: int, epoch: int) -> str:
    name = attempt_prefix(Attempt(step, epoch, f"{epoch:016x}")) + "model-00000-of-00001-0.safetensors"
    store.put(name, [b"x"])
    return name


def test_only_what_dead_owners_left_is_an_orphan(run_dir: Path) -> None:
    """P67: the present owner's attempts may be under way, newer ones are not ours; foreign files stay."""
    store = LocalStore(run_dir)
    old, present, newer = (put_attempt(store, 5, epoch) for epoch in (1, 2, 3))
    for foreign in ("notes.txt", "checkpoint_000000000005/notes.txt", "live/x.json", "evals/x.arrow"):
        store.put(foreign, [b"mine"])
    state = State(owner=owner_of(2))
    assert orphans(store, state) == [old]
    assert orphans(store, state.released()) == [old, present]
    assert orphans(store, state.sparing(1)) == []
    live = made(5, 7)
    store.put(live.manifest, [b"x"])
    assert orphans(store, State(owner=owner_of(2), live=(live,))) == [old]
    assert newer not in orphans(store, state.released())


@pytest.fixture
def history(run_dir: Path) -> History:
    """Make a run with steps 1, 2, 3, still held by its owner."""
    ckpt = opened(run_dir, max_num_checkpoints=None)
    for step in (1, 2, 3):
        ckpt.save(step, state_of(step))
    die(ckpt)
    return ckpt.run.history


def keeping_one(history: History) -> Retirement:
    def plan(state: State) -> list[Verdict]:
        return plan_prune(state, KEEP_ONE)

    return Retirement(history.store, history.head().state, plan, frozenset())


def test_what_was_pinned_or_leased_since_the_plan_stays(history: History) -> None:
    """P64, P66: a pin or a lease that came between plan and execution holds the checkpoint and its objects."""
    head = history.head()
    owner, (one, two, three) = head.state.owner, head.state.live
    assert owner is not None
    planned, again = keeping_one(history), keeping_one(history)
    assert planned.checkpoints == sorted([one.manifest_digest, two.manifest_digest])
    history.append({"kind": "pin"}, lambda state, n: state.with_pin(two.manifest_digest, "late"), owner=owner)
    retired = retire(history, owner, planned)
    assert steps(history.head()) == [2, 3]
    assert {name.startswith(prefix_of(one)) for name in retired} == {True}
    assert set(history.head().state.retired) == set(retired)
    with open_run(history.store.url).lease(two, "nightly"):
        history.append({"kind": "pin"}, lambda state, n: state.with_pin(two.manifest_digest, None), owner=owner)
        assert retire(history, owner, again) == ()
        assert steps(history.head()) == [2, 3]
    retire(history, owner, keeping_one(history))
    assert steps(history.head()) == [three.step]


def test_the_ledger_says_so_before_anything_is_deleted(run_dir: Path, history: History) -> None:
    """P30, P64: the retire entry is durable before the first object goes, and manifests go before the rest."""
    calls = WatchedCalls()
    ckpt = opened(run_dir, calls=calls, max_num_checkpoints=1, take_over=True)
    ckpt.restore(state_of(0))
    n = history.head().next_n
    ckpt.prune()
    ckpt.close()
    log = [(name, path.removeprefix(f"{run_dir}/")) for name, path in calls.log]
    deletions = [path for name, path in log if name == "unlink" and path.startswith("checkpoint_")]
    first = log.index(("unlink", deletions[0]))
    committed = log.index(("link", ledger_name(n)))
    assert ("fsync", f"{run_dir}/ledger".removeprefix(f"{run_dir}/")) in log[committed:first]
    for step in ("000000000001", "000000000002"):
        own = [path for path in deletions if step in path]
        assert len(own) > 3
        assert own[0].endswith("/manifest.json")


def test_what_is_pruned_while_it_is_verified_is_no_damage(run_dir: Path, history: History) -> None:
    """P64: verifying beside a training run leaves out what retention took meanwhile, and says so of nothing else."""
    ckpt = opened(run_dir, max_num_checkpoints=1, take_over=True)
    ckpt.restore(state_of(0))
    first, *_ = history.head().state.live

    class PrunedMeanwhile(WrappedStore):
        def get(self, name: str, max_bytes: int) -> bytes:
            if name == first.manifest:
                ckpt.prune()
            return super().get(name, max_bytes)

    faults = verify_run_directory(History(PrunedMeanwhile(LocalStore(run_dir))))
    assert (run_dir / first.manifest).exists() is False
    assert faults.good
    assert [c.step for c, _ in faults.checkpoints.values()] == [3, 2]  # 2 was read while it was there
    (newest,) = history.head().state.live
    (run_dir / newest.manifest).unlink()
    assert not verify_run_directory(history).good
    ckpt.close()
