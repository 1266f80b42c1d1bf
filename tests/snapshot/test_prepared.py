"""Which plan of a snapshot fits which state, and memory that is made ready before the snapshot needs it."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.process.processes import map_memory
from ckpt_tasks.snapshot.first import FirstCopy
from ckpt_tasks.snapshot.memory import MemoryDirectory, private_root, touch
from ckpt_tasks.snapshot.snapshot import plan_snapshot

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


@pytest.mark.parametrize("start", ["saved at 0", "restored at 0"])
def test_the_first_snapshot_with_steps_finds_its_memory(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """Optimizers make their state in their first step: as soon as one is reported, memory is made ready for that."""
    state, write = training(), FirstCopy.write
    written: list[FirstCopy] = []

    def writing(first: FirstCopy, files: Mapping[str, int]) -> bool:
        written.append(first)
        return write(first, files)

    monkeypatch.setattr(FirstCopy, "write", writing)
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


def test_memory_is_not_made_ready_while_a_commit_is_under_way(run_dir: Path) -> None:
    """What is on its way still has the old structure."""
    state = training()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=5)) as ckpt:
        ckpt.restore(state)
        ckpt.save(0, state)
        before = ckpt._saver._rank._plan
        monitor = ckpt._saver._pipeline
        with monitor._changed:
            monitor._flushing = object()  # type: ignore[assignment]
        train(state)
        ckpt.step(1, state)
        assert ckpt._saver._rank._plan is before
        with monitor._changed:
            monitor._flushing = None
        ckpt.step(2, state)
        assert ckpt._saver._rank._plan is not before


def test_what_is_made_ready_for_a_plan_that_is_gone_is_not_kept(run_dir: Path) -> None:
    """A thread that comes late makes nothing ready: the next snapshot may have another structure."""
    state = training()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        ckpt.save(1, state)
        ready()
        ckpt._saver.forget_plan()
        late = threading.Thread(
            target=ckpt._saver._rank.take_ahead, args=("a",)
        )  # it stands back for training from then on
        late.start()
        late.join()
        assert not ckpt._saver._rank._sets


def test_a_plan_fits_no_part_of_its_structure() -> None:
    """A state that lost or gained its last tensor, froze one, or has another part of one, is planned again."""
    state = {f"model/{name}": torch.ones(3) for name in "abc"}
    plan = plan_snapshot(state)
    assert plan.fits({**state}, frozenset(), {})
    assert not plan.fits({name: state[name] for name in ("model/a", "model/b")}, frozenset(), {})
    assert not plan.fits({**state, "model/d": torch.ones(3)}, frozenset(), {})
    assert not plan.fits(state, frozenset({"model/c"}), {})
    assert not plan.fits(state, frozenset(), {"model/c": ((6,), (3,))})
