"""Snapshots in a memory directory outlive their process, and are used only where they belong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import StoreError
from ckpt_tasks.saving.rank_saver import RankSaver
from ckpt_tasks.snapshot.memory import MemoryDirectory, private_root
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.local_fs import Calls
from ckpt_tasks.testing import FaultyStore, die, located, seal, settle
from tests.crash.memory_loop import state_of, step_of
from tests.support.calls import WatchedCalls
from tests.support.cli_runs import flip
from tests.support.interpreters import python
from tests.support.pipelines import committed
from tests.support.small_disk import small_disk
from tests.support.waiting import until

SIZE = 1 << 14


class Stuck(WatchedCalls):
    """Let no write to a checkpoint's objects end before the test does."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def cut(self, fd: int, piece: Any) -> Any:
        if "/checkpoint_" in self.paths[fd]:
            self.over.wait(120)
            raise OSError(errno.EIO, "the test is over")
        return piece


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    made = Stuck()
    yield made
    made.over.set()


def _loop(run_dir: Path, memory: Path, *options: str, status: int = 0) -> str:
    done = python("-m", "tests.crash.memory_loop", run_dir, memory, *options)
    assert done.returncode == status, done.stdout[-2000:] + done.stderr
    return done.stdout


def _config(run_dir: Path, memory: Path, calls: Calls = os) -> CheckpointConfig:
    location = located(LocalStore(run_dir, calls=calls))
    return CheckpointConfig(checkpoint_dir=location, memory_dir=str(memory), step_interval=1, max_num_checkpoints=3)


def _train(run_dir: Path, memory: Path, steps: int) -> tuple[int, str, list[str]]:
    """Restore, check that it is one moment, and go on; return the step restored, its source, and what was skipped."""
    with Checkpointer(_config(run_dir, memory)) as ckpt:
        state = state_of(0, SIZE)
        restored = ckpt.restore(state)
        assert step_of(state) == restored
        report = ckpt.last_restore
        for step in range(restored + 1, restored + 1 + steps):
            ckpt.save(step, state_of(step, SIZE))
    return restored, report.source if report else "", [f"{n} {why}" for n, why in report.skipped] if report else []


def _died(run_dir: Path, memory: Path, step: int, calls: Any = os) -> None:
    """Train up to a step and leave everything as a killed process does; with `Stuck` calls, storage has none of it."""
    ckpt = Checkpointer(_config(run_dir, memory, calls))
    ckpt.restore(state_of(0, SIZE))
    while ckpt.position < step:
        ckpt.step(ckpt.position + 1, state_of(ckpt.position + 1, SIZE))
        if calls is os:
            ckpt.wait()
    die(ckpt)


def _slots(memory: Path) -> list[Path]:
    return sorted(path.parent for path in memory.rglob("seal.json"))


def test_what_storage_lacks_is_restored_from_memory_and_committed(run_dir: Path, memory: Path) -> None:
    """P44, P72: killed with the store far behind, the next process goes on from the last snapshot and commits it."""
    _train(run_dir, memory, 2)
    _loop(run_dir, memory, "--kill-at", "7", "--delay-s", "60", status=-signal.SIGKILL)
    assert committed(run_dir) == [1, 2]
    restored, source, _ = _train(run_dir, memory, 0)
    assert restored == 7
    assert source.startswith(str(memory))
    assert committed(run_dir)[-1] == 7
    state = state_of(0, SIZE)
    run = open_run(str(run_dir))
    run.restore(run.find(7), state)
    assert step_of(state) == 7


def test_a_restore_from_memory_verifies_nothing_on_storage(run_dir: Path, memory: Path, tmp_path: Path) -> None:
    """P60: a checkpoint that was read from memory alone, with a bit flipped on storage, does not push the good one out.

    The memory is gone at the next start: the older checkpoint must be there.
    """
    _died(run_dir, memory, 3)
    (shard,) = run_dir.glob("checkpoint_000000000003/*/one-*.safetensors")
    flip(shard, shard.stat().st_size - 1)
    with Checkpointer(replace(_config(run_dir, memory), max_num_checkpoints=1)) as ckpt:
        ckpt.restore(state_of(0, SIZE))
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.source.startswith(str(memory))
        ckpt.prune()
        notes = [note for note in open_run(str(run_dir)).notes() if note["note"] == "damaged"]
        assert [note["step"] for note in notes] == [3]
    restored, _, skipped = _train(run_dir, tmp_path, 0)
    assert restored == 2
    assert [line.partition(" ")[0] for line in skipped] == ["3"]


class InTurn(WatchedCalls):
    """Write the objects of step 2 once told to, and those of step 3 never."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.over = threading.Event(), threading.Event()

    def cut(self, fd: int, piece: Any) -> Any:
        if "checkpoint_000000000002/" in self.paths[fd]:
            self.second.wait(60)
        elif "checkpoint_000000000003/" in self.paths[fd]:
            self.over.wait(60)
            raise OSError(errno.EIO, "the test is over")
        return piece


def test_what_was_on_its_way_may_land_after_a_snapshot_was_sealed(run_dir: Path, memory: Path) -> None:
    """P71: step 3 is sealed while step 2 is written; step 2 lands; killed then, the run goes on from 3, not from 2."""
    calls = InTurn()
    _train(run_dir, memory, 1)
    ckpt = Checkpointer(_config(run_dir, memory, calls))
    ckpt.restore(state_of(0, SIZE))
    ckpt.step(2, state_of(2, SIZE))
    ckpt.step(3, state_of(3, SIZE))
    seal(ckpt)
    calls.second.set()
    until(lambda: committed(run_dir) == [1, 2])
    die(ckpt)
    restored, source, _ = _train(run_dir, memory, 0)
    calls.over.set()
    assert restored == 3
    assert source.startswith(str(memory))


@pytest.mark.parametrize("file", ["one-00000-of-00001-0.safetensors", "index.arrow", "manifest.json", "seal.json"])
@pytest.mark.parametrize("damage", ["flip", *(pytest.param(how, marks=pytest.mark.slow) for how in ("cut", "gone"))])
def test_a_damaged_snapshot_is_passed_over(run_dir: Path, memory: Path, stuck: Stuck, file: str, damage: str) -> None:
    """P49: one bit flipped, a file cut or gone in the newest slot: the older one of memory or storage is taken."""
    _train(run_dir, memory, 2)
    _died(run_dir, memory, 7, stuck)
    newest = max(_slots(memory), key=lambda slot: json.loads((slot / "seal.json").read_text())["checkpoint"]["step"])
    victim = newest / file
    half = victim.stat().st_size // 2
    if damage == "gone":
        victim.unlink()
    elif damage == "cut":
        os.truncate(victim, half)
    else:
        flip(victim, half)
    restored, _, skipped = _train(run_dir, memory, 0)
    assert restored == 3  # on its way to storage when the others were taken
    assert any(why.startswith("7 in memory:") for why in skipped) == (file != "seal.json")
    assert committed(run_dir)[-1] == restored


def test_a_snapshot_without_a_seal_is_nothing(run_dir: Path, memory: Path, stuck: Stuck, caplog: Any) -> None:
    """P31: a slot that was being filled when the process died has no seal and is not looked at."""
    _train(run_dir, memory, 2)
    _died(run_dir, memory, 7, stuck)
    for slot in _slots(memory):
        (slot / "seal.json").unlink()
    restored, source, _ = _train(run_dir, memory, 0)
    assert (restored, source.startswith(str(run_dir)), "is not used" in caplog.text) == (2, True, False)


def test_memory_older_than_storage_is_left_alone(run_dir: Path, memory: Path, stuck: Stuck, tmp_path: Path) -> None:
    """P71: when another process has committed since, on another host, what lies in memory is not part of the run."""
    _train(run_dir, memory, 2)
    _died(run_dir, memory, 7, stuck)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert _train(run_dir, elsewhere, 1)[0] == 2
    restored, source, _ = _train(run_dir, memory, 0)
    assert restored == 3
    assert source.startswith(str(run_dir))


def test_a_new_run_in_the_same_place_does_not_see_the_old_ones_memory(
    run_dir: Path, memory: Path, stuck: Stuck
) -> None:
    """P66: a directory that was deleted and begun again is another run, whatever lies in memory under its path."""
    _died(run_dir, memory, 7, stuck)
    shutil.rmtree(run_dir)
    assert _train(run_dir, memory, 0)[0] == 0


def test_a_slot_is_filled_only_when_the_other_one_is_sealed(
    run_dir: Path, memory: Path, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P31: at every moment after the first snapshot one slot is complete, also right after a restore from memory."""
    _died(run_dir, memory, 7, stuck)
    ckpt = Checkpointer(_config(run_dir, memory, stuck))
    state = state_of(0, SIZE)
    assert ckpt.restore(state) == 7
    seal(ckpt)
    unslowed, gone = RankSaver.seal, []

    def slowly(*arguments: Any) -> None:
        time.sleep(0.05)
        gone.append(len(_slots(memory)))
        unslowed(*arguments)

    monkeypatch.setattr(RankSaver, "seal", slowly)
    for step in (8, 9, 10, 11):
        ckpt.step(step, state_of(step, SIZE))
    seal(ckpt)
    assert gone == [1, 1, 1, 1]
    die(ckpt)


def test_two_runs_on_one_host_do_not_meet(run_dir: Path, memory: Path, stuck: Stuck, tmp_path: Path) -> None:
    """Two runs with one memory directory have slots of their own."""
    other = tmp_path / "other"
    _died(run_dir, memory, 7, stuck)
    _died(other, memory, 4, stuck)
    assert len({slot.parent for slot in _slots(memory)}) == 2
    assert _train(run_dir, memory, 0)[0] == 7
    assert _train(other, memory, 0)[0] == 4


def test_memory_is_cleaned_when_the_run_ends(run_dir: Path, memory: Path) -> None:
    """A run that ends well leaves nothing in the memory directory; one that ends with an error leaves its snapshots."""
    with suppress(ZeroDivisionError), Checkpointer(_config(run_dir, memory)) as ckpt:
        ckpt.step(1, state_of(1, SIZE))
        raise ZeroDivisionError
    assert len(_slots(memory)) == 1
    assert _train(run_dir, memory, 1)[0] == 1
    assert [*memory.rglob("*-00000*")] == []


def test_a_close_that_fails_leaves_what_storage_lacks(run_dir: Path, memory: Path) -> None:
    """P72: where the last snapshot could not be committed, closing says so and keeps it in memory."""
    store = FaultyStore(LocalStore(run_dir))
    ckpt = Checkpointer(replace(_config(run_dir, memory), checkpoint_dir=located(store)))
    ckpt.save(1, state_of(1, SIZE))
    store.on("refused", verb="put", name="^checkpoint_", times=1)
    ckpt.step(2, state_of(2, SIZE))
    with pytest.raises(StoreError):
        ckpt.close()
    restored, source, _ = _train(run_dir, memory, 0)
    assert restored == 2
    assert source.startswith(str(memory))


def test_pruning_from_outside_cleans_memory_but_for_what_storage_lacks(
    run_dir: Path, memory: Path, stuck: Stuck
) -> None:
    """P67: a prune clears slots that storage covers, and leaves a snapshot that only memory has."""
    _died(run_dir, memory, 2)
    with Checkpointer(_config(run_dir, memory)) as ckpt:
        ckpt.acquire()
        ckpt.prune()
    assert _slots(memory) == []
    _died(run_dir, memory, 9, stuck)
    with Checkpointer(_config(run_dir, memory)) as ckpt:
        ckpt.acquire()
        ckpt.prune()
    assert len(_slots(memory)) > 0
    assert _train(run_dir, memory, 0)[0] == 9


def test_a_second_process_keeps_its_snapshots_to_itself(
    run_dir: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P33: while one process holds the slots another one, which took the run over, uses its own memory and says so."""
    monkeypatch.setattr("ckpt_tasks.snapshot.cache.default_directory", lambda size_bytes: memory)
    config = CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=1)
    first = Checkpointer(config)
    first.step(1, state_of(1, SIZE))
    first.wait()
    second = Checkpointer(config, take_over=True)
    assert second.restore(state_of(0, SIZE)) == 1
    assert "of this process holds" in caplog.text
    second.step(2, state_of(2, SIZE))
    second.close()
    settle(first)
    die(first)
    assert committed(run_dir) == [1, 2]


def test_without_room_private_memory_is_used(
    run_dir: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P37: where the memory directory is too small, snapshots live in the process, and what is lost is said."""
    with small_disk(memory / "small", size="1m") as small:
        monkeypatch.setattr("ckpt_tasks.snapshot.cache.default_directory", lambda size_bytes: small)
        with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=1)) as ckpt:
            ckpt.step(1, {"x": torch.ones(1 << 20)})
            ckpt.step(2, {"x": torch.full((1 << 20,), 2.0)})
    assert "after a crash, training goes on from storage" in caplog.text
    state: dict[str, Any] = {"x": torch.zeros(1 << 20)}
    run = open_run(str(run_dir))
    run.restore(run.find("latest"), state)
    assert bool((state["x"] == committed(run_dir)[-1]).all())


def test_a_lock_dies_with_its_process(memory: Path) -> None:
    """P67: the slots of a killed process are free at once, also while a worker that it forked lives on."""
    root = private_root(memory)
    code = f"""
import os, sys, time
from pathlib import Path
from ckpt_tasks.snapshot.memory import MemoryDirectory
held = MemoryDirectory(Path({str(root)!r}), "run")
if os.fork() == 0:
    print("held", flush=True)
    time.sleep(60)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match="another process"):
            MemoryDirectory(root, "run")
        process.kill()
        process.wait()
        MemoryDirectory(root, "run").close(keep=False)
        os.killpg(process.pid, signal.SIGKILL)  # the worker


def test_a_start_waits_for_a_predecessor_that_is_dying(memory: Path) -> None:
    """A process that takes a run while its killed predecessor still holds the memory gets that memory."""
    root = private_root(memory)
    code = f"""
import sys, time
from pathlib import Path
from ckpt_tasks.snapshot.memory import MemoryDirectory
held = MemoryDirectory(Path({str(root)!r}), "run")
print("held", flush=True)
sys.stdin.read()
time.sleep(1)  # the kernel frees many GiB
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        process.stdin.close()
        MemoryDirectory(root, "run").close(keep=False)
