"""A rank that says nothing: the others raise within the deadline, nothing is committed, and training begins again."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt_tasks import Checkpointer
from ckpt_tasks.storage.local import LocalStore
from tests.ranks.test_failures import state_of, steps_of
from tests.ranks.training import config, train
from tests.ranks.victims import ANY_MOMENT, STEPS, Death, Life, train_and_die
from tests.support.gang import Gang, run

# Replicas without a collective: a rank that stops holds the others in nothing but a save.
KIND = "plain"
LIFE = Life(Death((), ANY_MOMENT), waits=True, pause_s=0.1, deadline_s=6)
_put = LocalStore.put


def error_of(gang: Gang, rank: int) -> str:
    """Return what a rank raises; it may report commits before."""
    kind, said = gang.said(rank)
    while kind == "report":
        kind, said = gang.said(rank)
    assert kind == "error", said
    return str(said)


@pytest.mark.slow  # the deadlines are waited for; test_disagreeing.py has a short one
@pytest.mark.parametrize(("size", "stopped"), [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_training_begins_again_beside_a_rank_that_is_stopped(tmp_path: Path, size: int, stopped: int) -> None:
    """SIGSTOP holds one rank: all others raise StoreError, and the next gang ends bit for bit beside it.

    Continued after that, the rank ends with an error and commits nothing, also where it owned the directory.
    """
    # Less than the deadline: when the others have raised, an owner that is stopped counts as gone.
    options = {"step_interval": 1, "owner_timeout_s": 2, "max_num_checkpoints": None}
    whole = run(size, train, KIND, str(tmp_path / "whole"), (STEPS, options))
    root = tmp_path / "run"
    with Gang(size, train_and_die, KIND, str(root), LIFE) as gang:
        assert gang.said(0) == ("report", ("commit", 1))
        gang.send(stopped, signal.SIGSTOP)
        for rank in {*range(size)} - {stopped}:
            error = error_of(gang, rank)
            assert "StoreError" in error
            assert f"rank {stopped} said nothing" in error or "cannot reach each other" in error
        before = steps_of(root)
        assert before[-1] < STEPS
        resumed = run(size, train, KIND, str(root), (STEPS, options))
        after = steps_of(root)
        assert after[-1] == STEPS
        gang.send(stopped, signal.SIGCONT)
        assert gang.end() == [1] * size
    assert steps_of(root) == after
    assert [rank["start"] for rank in resumed] == [resumed[0]["start"]] * size
    assert resumed[0]["start"] >= before[-1]
    assert [rank["digests"] for rank in resumed] == [rank["digests"] for rank in whole]


def one_is_slow_for_a_while(rank: int, size: int, root: str) -> tuple[int, int]:
    """Train until a step is committed that comes after those that rank 1 could not write in time."""
    slow = rank == 1

    def slowly(self: LocalStore, name: str, body: Any) -> None:
        if slow and name.startswith("checkpoint_"):
            time.sleep(2.5)
        _put(self, name, body)

    LocalStore.put = slowly  # type: ignore[method-assign]
    state, done = state_of("fsdp", size), torch.zeros(1)
    options = {"step_interval": 1, "on_flush_failure": "warn", "flush_timeout_s": 2, "memory_dir": None}
    with Checkpointer(config(root, **options)) as ckpt:
        step = ckpt.restore(state)
        while not done:
            step += 1
            ckpt.step(step, state)
            time.sleep(0.05)
            slow = slow and step < 50
            done.fill_(ckpt.last_commit is not None and ckpt.last_commit.step > 50)
            dist.all_reduce(done)
        ckpt.wait()
        assert ckpt.last_commit is not None
        return ckpt.last_commit.step, step


@pytest.mark.slow
def test_a_rank_that_is_slow_for_a_while_costs_saves_only(tmp_path: Path) -> None:
    """With on_flush_failure="warn" training goes on while rank 1 is too slow; once it is not, steps are committed."""
    (first, last), other = run(2, one_is_slow_for_a_while, str(tmp_path))
    assert other == (first, last)
    assert first == last
    assert steps_of(tmp_path)[-1] == last
    assert min(steps_of(tmp_path)) > 1
