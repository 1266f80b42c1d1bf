"""The ends of ranks: a signal, an exception, SIGKILL or SIGSTOP of one of them is the end of all, and loses nothing."""

from __future__ import annotations

import atexit
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt_tasks import Checkpointer
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.storage.local import LocalStore
from tests.checkpoint.ranks.training import attempt, config, put, state_of, steps_of, takes_over
from tests.support.gang import Gang, report, run


def until_signal(rank: int, size: int, root: str, options: dict[str, Any], held: str | None = None) -> None:
    """Train until a signal ends it; the first step lasts until there is a file `held`."""
    state = state_of("ddp", size)
    with Checkpointer(config(root, step_interval=1_000_000, **options)) as ckpt:
        ckpt.restore(state)
        for step in range(1, 100_000):
            dist.all_reduce(torch.ones(1))
            ckpt.step(step, state)
            if step in (1, 50):
                report(step)
            time.sleep(0.002)
            while held is not None and not Path(held).exists():
                time.sleep(0.01)


TERM, CTRL_C = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    "signals", [[(1, TERM)], [(0, CTRL_C), (1, CTRL_C)] * 2, pytest.param([(0, TERM)], marks=pytest.mark.slow)]
)
def test_a_signal_ends_all_at_one_step(tmp_path: Path, signals: list[tuple[int, signal.Signals]]) -> None:
    """P69: SIGTERM to one rank, or Ctrl-C to all, which a launcher sends once more: one step is committed, by all."""
    run_dir, go = tmp_path / "run", tmp_path / "go"
    with Gang(2, until_signal, str(run_dir), {}, str(go)) as gang:
        assert [gang.said(n)[1] for n in (0, 1)] == [1, 1]
        for rank, number in signals:
            gang.send(rank, number)
            time.sleep(0.1)  # apart: signals that come at once are one already
        go.touch()
        assert gang.end(60) == [1 if signals[0][1] == CTRL_C else -TERM] * 2  # as of KeyboardInterrupt
    [step] = steps_of(run_dir)
    assert step > 1


@pytest.mark.slow
def test_a_save_by_the_clock_falls_on_one_step(tmp_path: Path) -> None:
    """Seconds pass differently in each rank; what is saved by them is whole."""
    with Gang(2, until_signal, str(tmp_path), {"save_interval_secs": 0.1}) as gang:
        for n in (0, 1):
            assert [gang.said(n)[1], gang.said(n)[1]] == [1, 50]
        gang.send(0, TERM)
        assert gang.end(60) == [-TERM] * 2
    assert len(steps_of(tmp_path)) > 1


def one_ends(rank: int, size: int, root: str, how: str) -> None:
    """Save every step. Rank 1 raises, dies in mid-step, or hangs as on another host, and the others fail in it."""
    state = state_of("ddp", size)
    with Checkpointer(config(root, step_interval=1, flush_timeout_s=600)) as ckpt:
        ckpt.restore(state)
        for step in range(1, 4):
            ckpt.step(step, state)
        ckpt.wait()
        if rank == 1:
            if how == "raises":
                raise ValueError("bad batch")
            report("ready")
            signal.pause()
        ckpt.step(4, state)  # rank 1 never hands its part in
        report("ready")
        if how != "told":
            dist.all_reduce(torch.ones(1))
        raise RuntimeError("a step fails")


@pytest.mark.parametrize("how", ["killed", "raises", pytest.param("told", marks=pytest.mark.slow)])
def test_the_end_of_a_rank_ends_the_wait_for_it(tmp_path: Path, how: str) -> None:
    """Rank 1 is killed in mid-step, or raises: the others end in seconds, not after the timeout; told by SIGTERM too.

    What was committed is there.
    """
    others = [0, 2]
    with Gang(3, one_ends, str(tmp_path), how) as gang:
        for n in others if how == "raises" else range(3):
            assert gang.said(n) == ("report", "ready")
        for n in others if how == "told" else [1] * (how == "killed"):
            gang.send(n, signal.SIGKILL if how == "killed" else TERM)
        for n in others:
            gang.processes[n].join(120)
            assert gang.processes[n].exitcode == (-TERM if how == "told" else 1)
            if how == "killed":
                assert "The last snapshot could not be saved either: rank 1 has ended" in gang.said(n)[1]
    assert steps_of(tmp_path)[-1] == 3


def ends(rank: int, size: int, root: str, group: str) -> None:
    """Take a snapshot and end as a script does that forgets close(); the store is slow meanwhile."""

    def late(self: LocalStore, name: str, body: Any) -> None:
        time.sleep(0.1)
        put(self, name, body)

    LocalStore.put = late  # type: ignore[method-assign]
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
    """P72: the interpreter's end waits for all ranks, also where the program has destroyed its process group."""
    with Gang(2, ends, str(tmp_path), group) as gang:
        assert gang.end(60) == [3, 3]
    assert steps_of(tmp_path) == [1]
    owner = open_run(tmp_path).head().state.owner
    assert owner is not None
    assert owner.released


def keeps_saving(rank: int, size: int, root: str) -> tuple[str, str]:
    """Save until that is refused; report once that there is a checkpoint."""
    state = state_of("fsdp", size)
    ckpt = Checkpointer(config(root, flush_timeout_s=4, owner_timeout_s=30))
    for step in range(1, 10_000):
        if step == 2:
            report("saved")
        said = attempt(ckpt.save, step, state)
        if said[0] != "None":
            return said
        time.sleep(0.01)
    return "None", ""


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_fails_the_save_of_the_others(tmp_path: Path, stopped: int) -> None:
    """SIGSTOP holds one rank, also the one that holds the process group's store: the other one raises StoreError.

    The next gang goes on beside it. Continued after that, the rank ends and commits nothing, though it held the run.
    """
    with Gang(2, keeps_saving, str(tmp_path)) as gang:
        assert [gang.said(rank)[1] for rank in (0, 1)] == ["saved"] * 2
        gang.send(stopped, signal.SIGSTOP)
        kind, (error, words) = gang.said(1 - stopped, 60)
        assert (kind, error) == ("result", "StoreError"), words
        assert f"rank {stopped} said nothing" in words or "cannot reach" in words
        assert run(2, takes_over, str(tmp_path))[0] >= 1
        after = steps_of(tmp_path)
        gang.send(stopped, signal.SIGCONT)
        kind, said = gang.said(stopped, 60)
        assert "FencedError" in said or "StoreError" in said, said
    assert steps_of(tmp_path) == after
    assert after[-1] == 20_000
