"""Which plan of a snapshot fits which state, and memory that is made ready before the snapshot needs it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.memory.first import FirstCopy
from ckpt_tasks.checkpoint.memory.memory import MemoryDirectory, private_root
from ckpt_tasks.checkpoint.memory.pages import touch
from ckpt_tasks.checkpoint.memory.snapshot import plan_snapshot
from ckpt_tasks.process import map_memory
from ckpt_tasks.testing import die, images_of

SIZE_BYTES = 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def training() -> dict[str, Any]:
    """Make a model, and an optimizer that has no state before its first step."""
    model = nn.Linear(64, 64)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.ones(1, 64)).sum().backward()
    state["optimizer"].step()


def ready() -> None:
    """Wait until what makes memory ready has ended."""
    for thread in threading.enumerate():
        if thread.name in ("ckpt-take", "ckpt-seal"):
            thread.join()


def test_touched_memory_is_there_and_holds_what_it_held() -> None:
    """Touching takes the pages, and changes none of those that somebody has filled."""
    memory = map_memory(SIZE_BYTES)
    memory[SIZE_BYTES // 2] = 7
    before = resident_bytes()
    touch(memory, lambda: True)
    assert resident_bytes() - before > SIZE_BYTES * 0.9
    assert memory[SIZE_BYTES // 2] == 7


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[FirstCopy]:
    """List the copies into new memory, which training waits for."""
    write, found = FirstCopy.write, list[FirstCopy]()

    def writing(first: FirstCopy, files: Mapping[str, int]) -> bool:
        found.append(first)
        return write(first, files)

    monkeypatch.setattr(FirstCopy, "write", writing)
    return found


def test_the_first_snapshot_with_steps_finds_its_memory(run_dir: Path, written: list[FirstCopy]) -> None:
    """Optimizers make their state in their first step: as soon as one is reported, memory is made ready for that."""
    state = training()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=3)) as ckpt:
        assert ckpt.restore(state) == 0
        ckpt.save(0, state)
        for step in (1, 2):
            train(state)
            ckpt.step(step, state)
            ready()
        written.clear()
        train(state)
        assert ckpt.step(3, state)
    assert not written, "the memory was new"
    assert open_run(str(run_dir)).find("latest").step == 3


def test_the_first_saves_after_a_resume_find_their_memory(run_dir: Path, written: list[FirstCopy]) -> None:
    """A restore knows the whole state, the optimizer's too: both slots are made ready before a step is reported.

    Of a small state the first save makes them: a walk over many small tensors takes longer than their memory.
    """
    state = training() | {"ballast": torch.zeros(SIZE_BYTES // 4)}
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        train(state)
        ckpt.save(1, state)
    written.clear()
    before = resident_bytes()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None, step_interval=1)) as ckpt:
        assert ckpt.restore(state) == 1
        ready()
        assert [*images_of(ckpt)] == ["a", "b"]
        assert resident_bytes() > before
        for step in (2, 3):
            train(state)
            assert ckpt.step(step, state)
            ckpt.wait()
    assert not written, "the memory was new"


def test_a_sealed_snapshot_makes_no_room_for_memory_that_may_not_be_needed(run_dir: Path, tmp_path: Path) -> None:
    """P60: until the next one is sealed, what was restored from memory stays there."""
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=str(tmp_path), step_interval=5)
    state = training() | {"ballast": torch.zeros(SIZE_BYTES // 4)}
    train(state)
    ckpt = Checkpointer(config)
    ckpt.save(1, state)
    die(ckpt)
    with Checkpointer(config) as ckpt:
        assert ckpt.restore(state) == 1
        ready()
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.source.startswith(str(tmp_path))
        assert len([*tmp_path.rglob("seal.json")]) == 1
        die(ckpt)
    with Checkpointer(config) as ckpt:
        assert ckpt.restore(state) == 1
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.source.startswith(str(tmp_path))


@pytest.mark.parametrize("left", ["whole", "short", "sparse", "linked twice", "a link", "of this process"])
def test_a_slot_takes_only_whole_files_that_an_earlier_process_has_left(tmp_path: Path, left: str) -> None:
    """Their pages are there already. Any other file may be another's, or read by a thread of this process."""
    directory = MemoryDirectory(private_root(tmp_path), "run")
    (slot := directory.path / "a").mkdir(mode=0o700)
    file, size_bytes = slot / "x", 3 * mmap.PAGESIZE
    (target := tmp_path / "target").write_bytes(b"t" * size_bytes)
    file.write_bytes(b"x" * (size_bytes - (left == "short")))
    if left == "sparse":
        os.truncate(file, 0)
        os.truncate(file, size_bytes)
    if left == "linked twice":
        os.link(file, tmp_path / "other")
    if left == "a link":
        file.unlink()
        file.symlink_to(target)
    if left == "of this process":
        directory.take("a", {"x": size_bytes})
    with file.open("rb") as before:  # while it is open no new file gets its number
        taken = directory.take("a", {"x": size_bytes})["x"]
        assert os.path.samestat(os.fstat(before.fileno()), file.stat()) == (left == "whole")
    taken[:] = b"n" * size_bytes
    assert file.read_bytes() == b"n" * size_bytes
    assert target.read_bytes() == b"t" * size_bytes
    directory.close(keep=False)


def test_a_plan_fits_no_part_of_its_structure() -> None:
    """A state that lost or gained its last tensor, froze one, or has another part of one, is planned again."""
    state = {f"model/{name}": torch.ones(3) for name in "abc"}
    plan = plan_snapshot(state)
    assert plan.fits({**state}, frozenset(), {})
    assert not plan.fits({name: state[name] for name in ("model/a", "model/b")}, frozenset(), {})
    assert not plan.fits({**state, "model/d": torch.ones(3)}, frozenset(), {})
    assert not plan.fits(state, frozenset({"model/c"}), {})
    assert not plan.fits(state, frozenset(), {"model/c": ((6,), (3,))})
