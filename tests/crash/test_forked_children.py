"""Fork at every phase: a child that is forked from a training process changes nothing of its parent's run.

Phases are reached by letting a function of ours wait, before it runs as always, until the child has been forked.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ckpt_tasks import open_run
from ckpt_tasks.checkpoint.interrupt import held_back
from ckpt_tasks.checkpoint.memory.memory import MemoryDirectory
from ckpt_tasks.checkpoint.restore.fetch import StoredTensors
from ckpt_tasks.checkpoint.save.pruning import Pruner
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.state.tensors.tensors import same_bits
from ckpt_tasks.storage.local import LocalStore
from tests.crash.forked import (
    SIZE,
    Forking,
    Phase,
    check_child,
    check_run,
    child_of,
    forked,
    inherited,
    state_at,
    training,
)
from tests.support.interpreters import python
from tests.support.sweeps import quick_first

LAST = 4

SAVING: dict[str, Phase] = {
    "copy": ("ckpt_tasks.checkpoint.memory.snapshot", "copy_tensors"),
    "digest": ("ckpt_tasks.checkpoint.save.rank_saver", "digest_image"),
    "prepare": ("ckpt_tasks.checkpoint.save.rank_saver", "prepare_part"),
    "seal": (MemoryDirectory, "seal"),
    "flush": (LocalStore, "put"),
    "commit": (History, "append"),
    "prune": (Pruner, "_delete"),
}


@pytest.fixture(autouse=True)
def _no_child_left() -> Iterator[None]:
    yield
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue


# ── phases ───────────────────────────────────────────────────────────────────────────────────────────────────────


RESTORING: dict[str, Phase] = {"a restore from memory": (StoredTensors, "copy")}
RESTORING["a restore from storage"] = (StoredTensors, "copy")
BETWEEN = ("before the first save", "between saves", "after close")
PRIVATE = ("copy", "commit", "a restore from storage")  # what is forked in other phases is as with a directory
MOMENTS = [(moment, True) for moment in (*SAVING, "a restore from memory", *BETWEEN)]
MOMENTS += [(moment, False) for moment in PRIVATE]


@pytest.mark.parametrize(("moment", "kept"), quick_first(MOMENTS, 4))
def test_a_child_that_is_forked_changes_nothing(
    run_dir: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, moment: str, kept: bool
) -> None:
    """P76: at every phase of a save or a restore, before, between and after saves, with a memory directory or without.

    The child has no image, no ownership and no handler, and the parent's saves are its own.
    """
    used = memory if kept else None
    before = signal.getsignal(signal.SIGTERM)
    restores = moment in RESTORING
    if restores:
        with suppress(ZeroDivisionError), training(run_dir, used) as ckpt:
            ckpt.save(1, state_at(1.0))
            raise ZeroDivisionError  # an error keeps the snapshots for the next process

    def check(now: str) -> None:
        if now == moment:
            check_child(forked(lambda: child_of(ckpt, used, before))(), os.getpid())

    with training(run_dir, used) as ckpt:
        phase = {**SAVING, **RESTORING}.get(moment)
        forking = Forking(monkeypatch, phase, lambda: child_of(ckpt, used, before)) if phase else None
        check("before the first save")
        if restores:
            assert forking is not None
            forking.armed = True
            state = state_at(0.0)
            assert ckpt.restore(state) == 1
            assert same_bits(state["large"], torch.ones(SIZE))
        for step in range(1 + restores, LAST + 1):
            if forking and not restores:
                forking.armed = step == LAST - 1  # both slots have been used, and are used again
            ckpt.step(step, state_at(float(step)))
            if step == LAST - 1:
                ckpt.wait()
            check("between saves")
        if forking:
            check_child(forking.answer(), os.getpid())
    check("after close")
    check_run(run_dir, [*range(1, LAST + 1)], owners=1 + restores)


# ── what lives on in a child ─────────────────────────────────────────────────────────────────────────────────────


class Squares(torch.utils.data.Dataset[int]):
    """What a loader's worker reads, which looks for files of its parent's snapshots.

    At their addresses it may have memory of its own: torch starts threads before it reads.
    """

    def __init__(self, memory: Path) -> None:
        self.memory = memory

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> int:
        assert inherited(self.memory) == []
        return number * number


def test_workers_of_a_loader_keep_no_image_alive(run_dir: Path, memory: Path) -> None:
    """P45: workers forked in the middle of a run have nothing of it, live on, and what the parent frees is free."""
    with training(run_dir, memory) as ckpt:
        ckpt.save(1, state_at(1.0))
        loader = DataLoader(Squares(memory), num_workers=2, persistent_workers=True, multiprocessing_context="fork")
        for step in (2, 3):
            assert [int(batch) for batch in loader] == [number * number for number in range(64)]
            ckpt.step(step, state_at(float(step)))
        ckpt.wait()
        pids = [worker.pid for worker in loader._iterator._workers]  # type: ignore[union-attr]
        for pid in pids:
            assert str(memory) not in Path(f"/proc/{pid}/maps").read_text()
            links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
            assert not [link for link in links if link.startswith(str(memory))]
        del loader
    check_run(run_dir, [1, 2, 3])


def _busy(started: str) -> None:
    Path(started).touch()
    time.sleep(600)


@pytest.mark.timeout(120)
def test_a_pool_within_the_block_is_terminated(run_dir: Path, memory: Path, tmp_path: Path) -> None:
    """P70: children forked within the block end at SIGTERM, in the middle of a save, and just as they are made."""
    with training(run_dir, memory) as ckpt:
        ckpt.step(1, state_at(1.0))
        pool = multiprocessing.get_context("fork").Pool(2)
        assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
        workers = [*pool._pool]  # type: ignore[attr-defined]
        started = [tmp_path / "first", tmp_path / "second"]
        for path in started:
            pool.apply_async(_busy, [str(path)])
        while not all(path.exists() for path in started):
            time.sleep(0.01)
        pool.terminate()
        pool.join()
        assert [worker.exitcode for worker in workers] == [-signal.SIGTERM] * 2
        child = multiprocessing.get_context("fork").Process(target=_busy, args=[str(tmp_path / "third")])
        child.start()
        child.terminate()  # at once: it may still be on its way
        child.join()
        assert child.exitcode == -signal.SIGTERM
        ckpt.step(2, state_at(2.0))
    check_run(run_dir, [1, 2])


def test_a_signal_that_the_parent_holds_back_is_not_the_childs(run_dir: Path) -> None:
    """P70: SIGTERM noted before the fork is the parent's alone, with blocks in blocks; the child has its own."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))

    def say() -> Any:
        seen = [held_back(), [*received]]
        signal.raise_signal(signal.SIGTERM)
        return [*seen, received]

    try:
        with training(run_dir.parent / "other", None), training(run_dir, None) as ckpt:
            signal.raise_signal(signal.SIGTERM)
            assert forked(say)() == [None, [], [signal.SIGTERM]]
            ckpt.step(1, state_at(1.0))
            assert received == []  # the outer block holds it
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [checkpoint.step for checkpoint in open_run(str(run_dir)).checkpoints()] == [1]


@pytest.mark.parametrize("closes_first", quick_first([True, False]))
def test_a_child_goes_on_with_a_run_that_its_parent_has_closed(run_dir: Path, memory: Path, closes_first: bool) -> None:
    """A daemon's idiom: the parent closes, a child makes a Checkpointer of its own, and trains on from memory.

    P76: a child that was forked before does not take the memory that its parent held for its own.
    """
    ckpt = training(run_dir, memory)
    ckpt.save(1, state_at(1.0))
    closed, closing = os.pipe()

    def train() -> Any:
        os.read(closed, 1)
        with training(run_dir, memory) as own:
            state = state_at(0.0)
            restored = own.restore(state)
            own.save(2, state_at(2.0))
            return [restored, float(state["large"][0]), inherited(memory) != []]

    if closes_first:
        ckpt.close()
    answer = forked(train)
    ckpt.close()
    os.write(closing, b"1")
    assert answer() == [1, 1.0, True]
    for end in (closed, closing):
        os.close(end)
    assert [checkpoint.step for checkpoint in open_run(str(run_dir)).checkpoints()] == [2, 1]


def test_a_lease_is_not_ended_by_a_child(run_dir: Path) -> None:
    """P61: a child that leaves the block of a lease leaves the lease to its parent."""
    with training(run_dir, None) as ckpt:
        ckpt.save(1, state_at(1.0))
    run = open_run(str(run_dir))

    def leave() -> Any:
        lease.__exit__(None, None, None)
        return "left"

    lease = run.lease(run.find(1), "a reader")
    lease.__enter__()
    assert forked(leave)() == "left"
    assert len(run.head().state.leases) == 1
    lease.__exit__(None, None, None)
    assert len(run.head().state.leases) == 0


# ── the ends of a child ──────────────────────────────────────────────────────────────────────────────────────────

_ENDS = """
    import os, sys
    import torch
    from ckpt_tasks import CheckpointConfig, Checkpointer

    ENDS = ["return", "sys.exit", "exception", "os._exit"]
    before, children = os.getpid(), []
    ckpt = Checkpointer(CheckpointConfig(
        checkpoint_dir={run_dir!r}, memory_dir={memory!r}, step_interval=1, max_num_checkpoints=None))
    with ckpt:
        for step, end in enumerate(ENDS, 1):
            ckpt.step(step, {{"x": torch.full((1 << 20,), float(step))}})
            pid = os.fork()
            if pid == 0:
                break
            children.append(pid)
        else:
            end = "parent"
        if end == "sys.exit":
            sys.exit(3)
        elif end == "exception":
            raise KeyError("of the child")
        elif end == "os._exit":
            os._exit(5)
        elif end == "parent":
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
            print("codes", codes, flush=True)
            ckpt.step(5, {{"x": torch.full((1 << 20,), 5.0)}})
"""


def test_however_a_child_ends_its_parent_goes_on(run_dir: Path, memory: Path) -> None:
    """P72, P76: children that return from the block, exit, raise or vanish release nothing, commit nothing and end."""
    code = textwrap.dedent(_ENDS.format(run_dir=str(run_dir), memory=str(memory)))
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "codes [0, 3, 1, 5]" in done.stdout
    assert done.stderr.count("Traceback") == done.stderr.count("KeyError: 'of the child'") == 1
    assert "ckpt-tasks:" not in done.stderr
    run = open_run(str(run_dir))
    events = [run.history.read_entry(n)[0].event["kind"] for n in range(run.head().next_n)]
    assert (events.count("owner"), events.count("release"), events[-1]) == (1, 1, "release")
    for checkpoint in run.checkpoints():
        state = {"x": torch.zeros(1 << 20)}
        run.restore(checkpoint, state)
        assert bool(state["x"].eq(checkpoint.step).all())
    assert run.checkpoints()[0].step == 5
