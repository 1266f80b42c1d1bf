"""What holds for one process holds for many: saves that are superseded or fail, a fork, and an end without close()."""

from __future__ import annotations

import atexit
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import ConfigError, StoreError
from ckpt_tasks.ledger.history import History
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import under_way
from tests.ranks.test_failures import state_of, steps_of
from tests.ranks.training import config
from tests.support.gang import Gang, run

_put = LocalStore.put


def events(root: Path) -> list[dict[str, Any]]:
    history = History(LocalStore(root))
    return [dict(history.read_entry(n)[0].event) for n in range(history.head().next_n)]


def one_is_slow(rank: int, size: int, root: str) -> list[int]:
    """Save at every step, faster than rank 1 can write; return the steps that this rank saw committed."""

    def slowly(self: LocalStore, name: str, body: Any) -> None:
        if name.startswith("checkpoint"):
            time.sleep(0.1)
        _put(self, name, body)

    if rank == 1:
        LocalStore.put = slowly  # type: ignore[method-assign]
    state, seen = state_of("fsdp", size), []
    with Checkpointer(config(root, step_interval=1, max_num_checkpoints=None)) as ckpt:
        ckpt.restore(state)
        for step in range(1, 13):
            ckpt.step(step, state)
            seen.append(ckpt.last_commit.step if ckpt.last_commit else 0)
        ckpt.wait()
        assert ckpt.last_commit is not None
        seen.append(ckpt.last_commit.step)
    return seen


def test_what_is_superseded_in_one_rank_is_so_in_all(tmp_path: Path) -> None:
    """A rank that cannot keep up makes all leave steps out; the newest is committed, and every commit is whole."""
    seen = run(2, one_is_slow, str(tmp_path))
    committed = steps_of(tmp_path)
    assert committed[-1] == 12
    assert len(committed) < 12
    assert all({*steps} - {0} <= {*committed} for steps in seen)
    assert any(event.get("superseded") for event in events(tmp_path))


def fails_once(rank: int, size: int, root: str) -> int:
    def full(self: LocalStore, name: str, body: Any) -> None:
        raise StoreError("no space left on device", key=name)

    state = state_of("fsdp", size)
    with Checkpointer(config(root, step_interval=1, on_flush_failure="warn", max_num_checkpoints=None)) as ckpt:
        ckpt.restore(state)
        for step in (1, 2, 3):
            LocalStore.put = full if (rank, step) == (1, 2) else _put  # type: ignore[method-assign]
            ckpt.step(step, state)
            while under_way(ckpt).steps:
                time.sleep(0.01)
        ckpt.wait()
    return ckpt.position


@pytest.mark.slow
def test_a_failed_save_is_a_warning_in_all_ranks(tmp_path: Path) -> None:
    """With on_flush_failure="warn" rank 1 cannot write one step: both ranks go on, and the run's history has it."""
    assert run(2, fails_once, str(tmp_path)) == [3, 3]
    assert steps_of(tmp_path) == [1, 3]
    [failed] = [event for event in events(tmp_path) if event.get("note") == "flush_failed"]
    assert failed["step"] == 2
    assert "rank 1: no space left" in failed["why"]


def forks(rank: int, size: int, root: str) -> list[int]:
    """Fork between two saves; the child tries to save, and ends."""
    state, statuses = state_of("fsdp", size), []
    with Checkpointer(config(root)) as ckpt:
        ckpt.save(1, state)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                ckpt.save(2, state)
            except ConfigError:
                status = 7
            finally:
                os._exit(status)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        ckpt.save(2, state)
    return statuses


def test_a_forked_child_of_a_rank_has_none_of_it(tmp_path: Path) -> None:
    """P76: a child cannot save in its rank's name, and the ranks go on."""
    assert run(2, forks, str(tmp_path)) == [[7], [7]]
    assert steps_of(tmp_path) == [1, 2]


def ends(rank: int, size: int, root: str, group: str) -> None:
    """Take a snapshot and end as a script does that forgets close(); the store is slow meanwhile."""

    def slowly(self: LocalStore, name: str, body: Any) -> None:
        time.sleep(0.1)
        _put(self, name, body)

    LocalStore.put = slowly  # type: ignore[method-assign]
    state = state_of("fsdp", size)
    ckpt = Checkpointer(config(root, step_interval=1, memory_dir=None))
    ckpt.restore(state)
    ckpt.step(1, state)
    if group == "destroyed":
        dist.destroy_process_group()
    atexit._run_exitfuncs()  # what Python calls at its end; a child of the fork server leaves it out
    os._exit(3)


@pytest.mark.parametrize("group", [pytest.param("left", marks=pytest.mark.slow), "destroyed"])
def test_an_end_without_close_commits_what_was_taken(tmp_path: Path, group: str) -> None:
    """The interpreter's end waits for all ranks, also where the program has destroyed its process group."""
    with Gang(2, ends, str(tmp_path), group) as gang:
        assert gang.end(60) == [3, 3]
    assert steps_of(tmp_path) == [1]
    owner = History(LocalStore(tmp_path)).head().state.owner
    assert owner is not None
    assert owner.released
