"""What killed runs left in the memory directory goes once the run itself is gone."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.checkpoint.memory.memory import MemoryDirectory, private_root, sweep
from ckpt_tasks.cli.doctor.host import holds as is_of
from tests.support.children import Child


def holds(arguments: Sequence[str]) -> None:
    run_dir, memory = arguments
    ckpt = Checkpointer(CheckpointConfig(checkpoint_dir=run_dir, memory_dir=memory))
    ckpt.save(1, {"weights": torch.zeros(1000)})
    print("saved", flush=True)  # noqa: T201 (the test waits for it)
    signal.pause()


def left(memory: Path) -> set[str]:
    """Name the directories of runs."""
    return {path.name for path in memory.glob("*/*")}


def killed(run_dir: Path, memory: Path, *, age_s: float) -> str:
    """Kill a run; return the name of what it left in memory, so many seconds ago."""
    before = left(memory)
    with Child(holds, [str(run_dir), str(memory)], run_dir.with_suffix(".said")) as child:
        child.until(lambda: child.said() == "saved\n")
        child.send(signal.SIGKILL)
        child.wait()
    (name,) = left(memory) - before
    aged(memory, name, age_s)
    return name


def aged(memory: Path, name: str, age_s: float) -> None:
    """Let it be so long since a run took its memory."""
    lock = next(memory.glob(f"*/{name}/lock"))
    os.utime(lock, (time.time() - age_s, time.time() - age_s))


def test_the_memory_of_a_run_that_is_gone_is_freed(tmp_path: Path) -> None:
    """P67: two states' worth of memory is not lost for ever; that of a run that is there, or was yesterday, stays."""
    memory = tmp_path / "memory"
    memory.mkdir()
    gone = killed(tmp_path / "gone", memory, age_s=100_000)
    young = killed(tmp_path / "young", memory, age_s=10)
    there = killed(tmp_path / "there", memory, age_s=100_000)
    for name in ("gone", "young"):
        shutil.rmtree(tmp_path / name)
    config = CheckpointConfig(checkpoint_dir=str(tmp_path / "next"), memory_dir=str(memory))
    with Checkpointer(config) as ckpt:
        ckpt.save(1, {"value": 1})
        found = left(memory)
        assert {young, there} < found
        assert gone not in found
        assert len(found) == 3  # and its own


def test_the_memory_of_a_process_that_lives_stays(tmp_path: Path) -> None:
    """P67: whoever holds it may commit it yet, this process or another, though the run directory is gone."""
    memory = tmp_path / "memory"
    memory.mkdir()
    with Child(holds, [str(tmp_path / "other"), str(memory)], tmp_path / "said") as other:
        assert other.until(lambda: other.said() == "saved\n")
        with Checkpointer(CheckpointConfig(checkpoint_dir=str(tmp_path / "own"), memory_dir=str(memory))) as own:
            own.save(1, {"value": 1})
            held = left(memory)
            for name in held:
                aged(memory, name, 100_000)
            (tmp_path / "other").rename(tmp_path / "elsewhere")
            (tmp_path / "own").rename(tmp_path / "away")
            with Checkpointer(CheckpointConfig(checkpoint_dir=str(tmp_path / "next"), memory_dir=str(memory))) as ckpt:
                ckpt.save(1, {"value": 1})
                assert held < left(memory)
            (tmp_path / "away").rename(tmp_path / "own")
    assert len(held) == 2


def test_the_last_step_is_noted_beside_the_name_of_the_run(tmp_path: Path) -> None:
    """The next process reads the last step of a memory directory; a sweep and the doctor still read the run's name."""
    (root := private_root(tmp_path)).joinpath("other").mkdir()
    memory = MemoryDirectory(root, "run", "/runs/first")
    assert memory.reached(0) is None
    memory.note_step(17)
    memory.close(keep=True)
    memory.note_step(18)  # The descriptor's number may be another file's by now.
    seen: list[tuple[str, str]] = []

    def is_seen(name: str, url: str) -> bool:
        seen.append((name, url))
        return False

    sweep(root, is_seen, left_s=-1)
    assert ("run", "/runs/first") in seen
    assert is_of(root / "run/lock", b"/runs/first")
    after = MemoryDirectory(root, "run", "/runs/first")
    assert after.reached(0) == 17
    after.close(keep=False)
