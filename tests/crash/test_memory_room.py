"""Where shared memory has no room, or no more room: it is said, nothing of it stays taken, and every commit lands."""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.memory.memory_room import default_directory
from tests.crash.lives import state_of, step_of

MIB = 1 << 20


@pytest.fixture
def shared(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that stands for a /dev/shm of 64 MiB, free but for what lies in it."""

    def statvfs(path: Path) -> Any:
        used_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return SimpleNamespace(f_bavail=(64 * MIB - used_bytes) // 4096, f_frsize=4096)

    monkeypatch.setattr("ckpt_tasks.checkpoint.memory.memory_room.SHARED_MEMORY", memory)
    monkeypatch.setattr(os, "statvfs", statvfs)
    return memory


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        yield caplog


def _opened(run_dir: Path, memory: Path | None = None) -> Checkpointer:
    return Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=str(memory) if memory else "auto"))


def _state(size_bytes: int, value: float) -> dict[str, Any]:
    return {"x": torch.full((size_bytes // 4,), float(value))}


def _left(memory: Path) -> list[Path]:
    """List all that lies below the user's own directory."""
    return [*memory.glob("ckpt-tasks-*/*")]


def _seals(memory: Path) -> list[Path]:
    return [*memory.rglob("seal.json")]


def test_shared_memory_is_used_where_two_snapshots_and_a_little_more_fit(shared: Path) -> None:
    """Of 64 MiB, two states of 20 or 30 MiB may be kept there; two of 31 leave too little, and two of 40 do not fit."""
    fits = {size: default_directory(size * MIB) for size in (0, 20, 30, 31, 40)}
    assert fits == {0: shared, 20: shared, 30: shared, 31: None, 40: None}


def test_shared_memory_is_not_used_where_the_machine_has_less(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file system promises the machine may not have: the lesser of the two counts."""

    def meminfo(path: Path, **_: Any) -> io.StringIO:
        assert path == Path("/proc/meminfo")
        return io.StringIO("MemTotal: 9999999 kB\nMemFree: 9999999 kB\nMemAvailable: 32768 kB\n")

    monkeypatch.setattr("ckpt_tasks.checkpoint.memory.memory_room.open", meminfo, raising=False)
    assert {size: default_directory(size * MIB) for size in (15, 20)} == {15: shared, 20: None}


@pytest.mark.parametrize("missing", [False, True])
def test_a_state_without_room_leaves_shared_memory_alone(
    run_dir: Path, shared: Path, warned: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    """Two states of 40 MiB in 64, or no shared memory: it is said once that they die with the process; all commits."""
    if missing:
        monkeypatch.setattr("ckpt_tasks.checkpoint.memory.memory_room.SHARED_MEMORY", shared / "missing")
    with _opened(run_dir) as ckpt:
        for step in (1, 2):
            ckpt.save(step, _state(40 * MIB, step))
            assert _left(shared) == []
    assert warned.text.count("Snapshots are kept in this process's own memory") == 1
    assert warned.text.count("after a crash, training resumes from storage") == 1
    run, found = open_run(str(run_dir)), _state(40 * MIB, 0)
    assert run.restore(run.find("latest"), found).step == 2
    assert bool((found["x"] == 2).all())
    with _opened(run_dir) as ckpt:
        ckpt.acquire()
        ckpt.prune()  # who saves nothing has nothing to lose
    assert warned.text.count("Snapshots are kept") == 1
    assert not (shared / "missing").exists()


def test_a_states_own_slots_are_room_for_it(run_dir: Path, shared: Path, warned: pytest.LogCaptureFixture) -> None:
    """A state that grows from 20 to 25 MiB takes the place of what it had; one of 40 does not fit even so."""
    with _opened(run_dir) as ckpt:
        for step, size in ((1, 20), (2, 20), (3, 25), (4, 25)):
            ckpt.save(step, _state(size * MIB, step))
            assert _seals(shared) != []
        assert "Snapshots are kept" not in warned.text
        ckpt.save(5, _state(40 * MIB, 5))
        assert _left(shared) == []
    assert warned.text.count("Snapshots are kept in this process's own memory") == 1
    assert open_run(str(run_dir)).find("latest").step == 5


@pytest.mark.parametrize("file", ["index.arrow", "manifest.json", ".seal.json"])
def test_a_snapshot_that_cannot_be_sealed_is_committed(
    run_dir: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture, file: str
) -> None:
    """ENOSPC at what comes after the images: it is said that memory will not have the step, and storage has it.

    The next step, with room again, is sealed and outlives the process.
    """
    opened, full = os.open, True

    def opening(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        if full and flags & os.O_CREAT and Path(path).name == file and memory in Path(path).parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, flags, *arguments, **more)

    monkeypatch.setattr(os, "open", opening)
    with suppress(ZeroDivisionError), _opened(run_dir, memory) as ckpt:
        ckpt.save(1, state_of(1))
        assert _seals(memory) == []
        assert "Step 1 will not survive this process in memory" in warned.text
        assert "cannot be sealed: No space left on device" in warned.text
        run, found = open_run(str(run_dir)), state_of(0)
        assert run.restore(run.find("latest"), found).step == step_of(found) == 1
        full = False
        ckpt.save(2, state_of(2))
        assert len(_seals(memory)) == 1
        raise ZeroDivisionError
    assert "Step 2 will not" not in warned.text
    with _opened(run_dir, memory) as ckpt:
        assert ckpt.restore(found := state_of(0)) == step_of(found) == 2
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.source.startswith(str(memory))
