"""Which plan of a snapshot fits which state, and memory that is made ready before the snapshot needs it."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.process.processes import map_memory
from ckpt_tasks.saving.rank_saver import RankSaver
from ckpt_tasks.snapshot.cache import SnapshotCache
from ckpt_tasks.snapshot.first import FirstCopy
from ckpt_tasks.snapshot.memory import MemoryDirectory, private_root
from ckpt_tasks.snapshot.pages import allocate, touch
from ckpt_tasks.snapshot.snapshot import plan_snapshot
from ckpt_tasks.state.capture import capture
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import die, images_of, under_way
from tests.support.pipelines import Gate, opened

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


class Stateful:
    """An object with a state, which may become unreadable once it has been loaded."""

    fails_after_load = loaded = False

    def state_dict(self) -> dict[str, int]:
        if self.loaded:
            raise RuntimeError("not now")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = self.fails_after_load


def ready() -> None:
    """Wait until what makes memory ready has ended."""
    for thread in threading.enumerate():
        if thread.name in ("ckpt-take", "ckpt-seal"):
            thread.join()


@pytest.mark.parametrize("shared", [False, True])
def test_touched_memory_is_there_and_holds_what_it_held(tmp_path: Path, shared: bool) -> None:
    """Touching takes the pages, and changes none of those that somebody has filled."""
    directory = MemoryDirectory(private_root(tmp_path), "run")
    memory = directory.take("a", {"x": SIZE_BYTES})["x"] if shared else map_memory(SIZE_BYTES)
    memory[SIZE_BYTES // 2] = 7
    before = resident_bytes()
    touch(memory, lambda: True)
    assert resident_bytes() - before > SIZE_BYTES * 0.9
    assert memory[SIZE_BYTES // 2] == 7
    directory.close(keep=False)


def test_memory_that_nobody_wants_any_more_is_left_alone() -> None:
    """Whoever closes while memory is made ready for the next snapshot does not get all of it taken behind his back."""
    memory, looks = map_memory(SIZE_BYTES), iter([True, False])
    before = resident_bytes()
    touch(memory, lambda: next(looks))
    assert SIZE_BYTES * 0.2 < resident_bytes() - before < SIZE_BYTES * 0.3
    assert [*looks] == []


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[FirstCopy]:
    """List the copies into new memory, which training waits for."""
    write, found = FirstCopy.write, list[FirstCopy]()

    def writing(first: FirstCopy, files: Mapping[str, int]) -> bool:
        found.append(first)
        return write(first, files)

    monkeypatch.setattr(FirstCopy, "write", writing)
    return found


@pytest.mark.parametrize("start", ["saved at 0", "restored at 0"])
def test_the_first_snapshot_with_steps_finds_its_memory(run_dir: Path, written: list[FirstCopy], start: str) -> None:
    """Optimizers make their state in their first step: as soon as one is reported, memory is made ready for that."""
    state = training()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=3)) as ckpt:
        assert ckpt.restore(state) == 0
        if start == "saved at 0":
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


@pytest.mark.parametrize("memory", ["auto", None])
def test_the_first_saves_after_a_resume_find_their_memory(
    run_dir: Path, written: list[FirstCopy], memory: str | None
) -> None:
    """A restore knows the whole state, the optimizer's too: both slots are made ready before a step is reported."""
    state = training()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        train(state)
        ckpt.save(1, state)
    written.clear()
    before = resident_bytes()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=memory, step_interval=1)) as ckpt:
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
    state = training()
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


@pytest.mark.parametrize("restore", ["a part", "an older one", "one of step 0"])
def test_no_memory_is_made_for_a_state_that_may_still_change(run_dir: Path, restore: str) -> None:
    """Only a restore of all that the newest checkpoint has says what the next save will need."""
    state = training()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), max_num_checkpoints=None)) as ckpt:
        for step in (0, 1, 2)[: 1 if restore == "one of step 0" else 3]:
            ckpt.save(step, state)
            train(state)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        if restore == "a part":
            ckpt.restore(state, only=["model"])
        else:
            ckpt.restore(state, step=1 if restore == "an older one" else None)
        ready()
        assert not images_of(ckpt)


def test_what_a_state_dict_raises_after_a_restore_is_raised_by_the_first_save(run_dir: Path) -> None:
    """The state has been restored, so restore() returns; a state that cannot be saved is refused when it is saved."""
    own = Stateful()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        ckpt.save(1, {"own": own})
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        own.fails_after_load = True
        assert ckpt.restore({"own": own}) == 1
        with pytest.raises(RuntimeError, match="not now"):
            ckpt.save(2, {"own": own})


def test_a_save_does_not_wait_for_memory_that_is_made_ahead(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, written: list[FirstCopy]
) -> None:
    """A thread of low priority may take long on a busy machine: it gives way, and the save makes its own memory."""
    begun, gave_way = threading.Event(), list[bool]()

    def slowly(files: Mapping[str, int], sizes: Mapping[str, int], wanted: Callable[[], bool]) -> None:
        begun.set()
        deadline = time.monotonic() + 30
        while wanted() and time.monotonic() < deadline:
            time.sleep(0.001)
        gave_way.append(not wanted())
        allocate(files, sizes, wanted)

    state = training()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        train(state)
        ckpt.save(1, state)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        monkeypatch.setattr("ckpt_tasks.saving.rank_saver.allocate", slowly)
        ckpt.restore(state)
        assert begun.wait(30)
        written.clear()
        ckpt.save(2, state)
        assert gave_way[0]
        assert written
        monkeypatch.undo()


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


def test_memory_that_is_ready_has_been_touched(run_dir: Path) -> None:
    """The kernel finds the pages of the first snapshot before it is taken, not while training waits for it."""
    state = {"weights": torch.ones(SIZE_BYTES // 4)}
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=2)) as ckpt:
        ckpt.restore(state)
        before = resident_bytes()
        ckpt.step(1, state)
        ready()
        assert resident_bytes() - before > SIZE_BYTES * 0.9


def test_closing_ends_what_makes_memory_ready(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still to be touched when the run is closed is not wanted any more."""
    closed, wanted_then = threading.Event(), []

    def after_closing(memory: memoryview, wanted: Callable[[], bool]) -> None:
        closed.wait(30)
        wanted_then.append(wanted())
        touch(memory, wanted)

    monkeypatch.setattr("ckpt_tasks.saving.rank_saver.touch", after_closing)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        ckpt.save(1, {"weights": torch.ones(8)})
    closed.set()
    ready()
    assert not any(wanted_then)


def test_memory_is_not_made_ready_while_a_commit_is_under_way(run_dir: Path, gate: Gate) -> None:
    """What is on its way still has the old structure."""
    state = training()
    with opened(run_dir, gate, step_interval=5) as ckpt:
        ckpt.restore(state)
        saving = threading.Thread(target=ckpt.save, args=(0, state))
        saving.start()
        assert gate.reached.wait(30)
        before = under_way(ckpt).size_bytes
        train(state)
        ckpt.step(1, state)
        assert under_way(ckpt).size_bytes == before
        gate.opened.set()
        saving.join()
        ckpt.step(2, state)
        assert under_way(ckpt).size_bytes > before


def test_what_is_made_ready_for_a_plan_that_is_gone_is_not_kept(run_dir: Path) -> None:
    """A thread that comes late makes nothing ready: the next snapshot may have another structure."""
    rank = RankSaver(SnapshotCache(LocalStore(run_dir), None))
    rank.plan(capture(training()))
    rank.forget()
    late = threading.Thread(target=rank.take_ahead, args=("a",))  # it stands back for training from then on
    late.start()
    late.join()
    assert not rank.images


def test_a_plan_fits_no_part_of_its_structure() -> None:
    """A state that lost or gained its last tensor, froze one, or has another part of one, is planned again."""
    state = {f"model/{name}": torch.ones(3) for name in "abc"}
    plan = plan_snapshot(state)
    assert plan.fits({**state}, frozenset(), {})
    assert not plan.fits({name: state[name] for name in ("model/a", "model/b")}, frozenset(), {})
    assert not plan.fits({**state, "model/d": torch.ones(3)}, frozenset(), {})
    assert not plan.fits(state, frozenset({"model/c"}), {})
    assert not plan.fits(state, frozenset(), {"model/c": ((6,), (3,))})
