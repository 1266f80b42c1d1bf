"""What surrounds a training process: names, descriptors and directories as some machines have them."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import StoreError
from ckpt_tasks.system import System
from tests.support.cli_runs import ckpt
from tests.support.systems import running_on

NOISE = b"noise of a C library"
_NOISY = f"""
import os, sys
from contextlib import suppress
from ckpt_tasks import CheckpointConfig, Checkpointer

class Noisy:
    def state_dict(self):
        for fd in range(3):
            with suppress(OSError):
                os.write(fd, {NOISE!r})
        return {{"value": 1}}

    def load_state_dict(self, state):
        pass

ckpt = Checkpointer(CheckpointConfig(checkpoint_dir=sys.argv[1], memory_dir=sys.argv[2]))
for step in range(1, 4):
    ckpt.save(step, {{"noisy": Noisy()}})
os._exit(0)
"""


def _restored(run_dir: Path) -> int:
    run, found = open_run(str(run_dir)), {"value": 0}
    run.restore(run.find("latest"), found)
    return found["value"]


def test_a_directory_whose_name_is_not_utf_8(tmp_path: Path, memory: Path) -> None:
    """A run lies, and has its snapshots in memory, below a directory that an old system named in Latin-1."""
    run_dir = tmp_path / os.fsdecode(b"l\xe4ufe") / "run"
    run_dir.parent.mkdir()
    with Checkpointer(CheckpointConfig(checkpoint_dir=run_dir, memory_dir=str(memory))) as opened:
        opened.save(1, {"value": 7})
        (lock,) = memory.glob("*/*/lock")
        assert lock.read_bytes() == os.fsencode(run_dir)
    assert _restored(run_dir) == 7
    assert ckpt("ls", run_dir).status == ckpt("prune", run_dir).status == 0


@pytest.mark.parametrize("again", [False, True], ids=["removed", "removed, and another one in its place"])
def test_a_memory_directory_that_is_emptied(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture, again: bool
) -> None:
    """Training goes on without memory that outlives it, says so once, and touches nothing that came in its place.

    systemd's logind removes all of a user's files in /dev/shm when the user logs out.
    """
    run_dir = tmp_path / "run"
    with (
        caplog.at_level(logging.WARNING, "ckpt_tasks"),
        Checkpointer(CheckpointConfig(checkpoint_dir=run_dir, memory_dir=str(memory))) as opened,
    ):
        for step in (1, 2, 3):
            opened.save(step, {"value": step})
        (lock,) = memory.glob("*/*/lock")
        shutil.rmtree(lock.parents[1])
        if again:
            (lock.parent / "a").mkdir(parents=True)
            for name in ("lock", "a/seal.json"):
                (lock.parent / name).touch()
        for step in (4, 5, 6):
            opened.save(step, {"value": step})
    assert caplog.text.count("somebody has removed the memory directory") == 1
    assert [path for path in memory.rglob("*") if path.is_file()] == (
        [lock, lock.parent / "a/seal.json"] if again else []
    )
    assert _restored(run_dir) == 6


def test_a_relative_memory_directory(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that changes its working directory keeps its snapshots where they were."""
    monkeypatch.chdir(memory.parent)
    with Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path / "run", memory_dir=memory.name)) as opened:
        for step in (1, 2, 3):
            opened.save(step, {"value": step})
        monkeypatch.chdir(tmp_path)
        for step in (4, 5):
            opened.save(step, {"value": step})
        assert len([*memory.rglob("seal.json")]) == 2
    assert "memory" not in caplog.text


@pytest.mark.slow
def test_a_process_without_standard_descriptors(tmp_path: Path, memory: Path) -> None:
    """What C code prints in a process that was started without stdin, stdout and stderr is in no file of the run."""
    loop = tmp_path / "loop.py"
    loop.write_text(_NOISY)
    command = 'exec "$@" <&- >&- 2>&-'
    subprocess.run(["bash", "-c", command, "", sys.executable, loop, tmp_path / "run", memory], check=True)
    files = [path for place in (tmp_path / "run", memory) for path in place.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if NOISE in path.read_bytes()] == []


class _NoThread(System):
    """A machine on which the threads of one name cannot be started."""

    def __init__(self, name: str):
        self._refused = name

    def start_thread(self, *arguments: Any, name: str, daemon: bool = True) -> threading.Thread:
        if name == self._refused:
            raise RuntimeError("can't start new thread")
        return super().start_thread(*arguments, name=name, daemon=daemon)


def test_no_thread_for_a_prune(tmp_path: Path) -> None:
    """Where `ulimit -u` leaves no thread to prune in, every save is committed, and the next owner prunes."""
    config = CheckpointConfig(checkpoint_dir=tmp_path / "run", memory_dir=None, max_num_checkpoints=1)
    with running_on(_NoThread("ckpt-prune")), Checkpointer(config) as opened:
        for step in (1, 2, 3):
            opened.save(step, {"value": step})
    assert _restored(tmp_path / "run") == 3
    with Checkpointer(config) as opened:
        opened.restore({"value": 0})
        opened.save(4, {"value": 4})
    assert len([*(tmp_path / "run").glob("checkpoint_*")]) == 1


def test_no_thread_for_a_heartbeat(tmp_path: Path) -> None:
    """A process that cannot keep its run says so, and leaves the run free."""
    with running_on(_NoThread("ckpt-heartbeat")), pytest.raises(StoreError, match="cannot start another thread"):
        Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path / "run", memory_dir=None)).acquire()
    owner = open_run(str(tmp_path / "run")).head().state.owner
    assert owner is not None
    assert owner.released
