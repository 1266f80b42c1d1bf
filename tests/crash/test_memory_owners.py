"""What another user made in the memory directory is not written to, not read, and not removed."""

from __future__ import annotations

import os
import signal
import stat
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.checkpoint.memory.memory import MemoryDirectory, private_root, sweep
from ckpt_tasks.errors import ConfigError, FencedError, StoreError
from tests.crash.lives import state_of, step_of
from tests.support.interpreters import Python
from tests.support.systems import Hurried, running_on

DIRECTORY, LOCK = "not a directory of this user's alone", "its lock is not a file of this user's alone"


def other_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be another user from now on: all that it has made is somebody else's."""
    uid = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: uid)


def others_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file that is open be another user's."""
    fstat = os.fstat

    def theirs(fd: int) -> os.stat_result:
        status = [*fstat(fd)]
        status[stat.ST_UID] += 1
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", theirs)


def test_a_directory_that_is_not_this_users_alone_is_refused(
    run_dir: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes the root or a run's directory under our name, or can write there, is not trusted: it is named."""
    root = private_root(memory)
    root.chmod(0o755)
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=str(memory))
    for refused in (lambda: private_root(memory), lambda: Checkpointer(config).save(1, {"x": 1})):
        with pytest.raises(ConfigError, match="alone"):
            refused()
    assert not run_dir.exists()
    root.chmod(0o700)
    (root / "run").mkdir(mode=0o700)
    other_user(monkeypatch)
    with pytest.raises(ConfigError, match=DIRECTORY):
        MemoryDirectory(root, "run")
    assert [*root.rglob("*")] == [root / "run"]
    root.rename(memory / f"ckpt-tasks-{os.getuid()}")
    with pytest.raises(ConfigError, match=DIRECTORY):
        private_root(memory)


def test_a_slot_of_another_user_is_neither_read_nor_written(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is somebody else's is empty for a restore, and every other use of it is refused."""
    held = MemoryDirectory(private_root(memory), "run")
    held.take("a", {"image": 4096})["image"][:5] = b"bytes"
    held.seal("a", {"manifest.json": b"{}"}, b"the seal")
    assert held.sealed("a") == b"the seal"
    assert bytes(held.open("a", "image")[:5]) == b"bytes"
    with monkeypatch.context() as patch:
        other_user(patch)
        assert held.sealed("a") is None
        uses: list[Callable[[], Any]] = [
            lambda: held.open("a", "image"),
            lambda: held.take("a", {"image": 1}),
            lambda: held.unseal("a"),
            lambda: held.seal("a", {"manifest.json": b"[]"}, b"another"),
        ]
        for use in uses:
            with pytest.raises(StoreError, match=DIRECTORY):
                use()
    assert held.sealed("a") == b"the seal"
    assert (held.path / "a/manifest.json").read_bytes() == b"{}"
    held.close(keep=False)


def test_a_lock_of_another_user_is_not_taken(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is somebody else's is not written to: it may be a link to a file of his; with ours all is well."""
    root = private_root(memory)
    MemoryDirectory(root, "run", "ours").close(keep=True)
    with monkeypatch.context() as patch:
        others_files(patch)
        with pytest.raises(StoreError, match=LOCK):
            MemoryDirectory(root, "run", "his")
    assert (root / "run/lock").read_text() == "ours"
    MemoryDirectory(root, "run", "ours").close(keep=False)


def test_what_another_user_left_is_not_swept(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what has a lock of our own is removed with its run."""
    root = private_root(memory)
    MemoryDirectory(root, "run", "gone").close(keep=True)
    os.utime(root / "run/lock", (time.time() - 100_000,) * 2)
    for pretend in (other_user, others_files):
        with monkeypatch.context() as patch:
            pretend(patch)
            sweep(root, lambda name, url: True)
        assert (root / "run/lock").exists()
    sweep(root, lambda name, url: True)
    assert [*root.iterdir()] == []


@pytest.mark.parametrize("whose", [DIRECTORY, LOCK])
def test_a_snapshot_of_another_user_is_not_restored(
    run_dir: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, whose: str
) -> None:
    """A snapshot that is somebody else's is left alone: that is said, and the run goes on from storage."""
    monkeypatch.setattr("ckpt_tasks.checkpoint.memory.memory_room.SHARED_MEMORY", memory)
    config = CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=1)
    with suppress(ZeroDivisionError), Checkpointer(config) as ckpt:
        ckpt.save(1, state_of(1))
        raise ZeroDivisionError
    ours = memory / f"ckpt-tasks-{os.getuid()}"
    (seal,) = ours.rglob("seal.json")
    before = seal.read_bytes()
    if whose == DIRECTORY:
        theirs = ours.rename(memory / f"ckpt-tasks-{os.getuid() + 1}")
        seal = theirs / seal.relative_to(ours)
        other_user(monkeypatch)
    else:
        others_files(monkeypatch)
    with Checkpointer(config) as ckpt:
        assert ckpt.restore(state := state_of(0)) == step_of(state) == 1
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.source.startswith(str(run_dir))
        ckpt.save(2, state_of(2))
    assert whose in caplog.text
    assert "Snapshots are kept in this process's own memory" in caplog.text
    assert seal.read_bytes() == before


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_fenced_process_leaves_no_snapshots_in_memory(
    run_dir: Path, memory: Path, error: type[Exception] | None
) -> None:
    """P67: what a process trained that has lost its run is not kept: its memory is free at its end, in error or not."""
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=str(memory))
    with suppress(FencedError, ZeroDivisionError), Checkpointer(config) as fenced:
        fenced.save(1, state_of(1))
        (seal,) = memory.rglob("seal.json")
        with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None), take_over=True) as other:
            other.restore(state_of(0))
            if error is not None:
                raise error
            with pytest.raises(FencedError):
                fenced.save(2, state_of(2))
    assert not seal.exists()
    assert [*memory.rglob("*.safetensors")] == []


@pytest.mark.parametrize("forks", [True, False])
def test_a_lock_dies_with_its_process(memory: Path, forks: bool) -> None:
    """P67: the slots of a killed process are free at once, also while a worker that it forked lives on.

    A start waits for a predecessor that is still dying: the kernel frees many GiB.
    """
    root = private_root(memory)
    code = f"""
        import os, sys, time
        from pathlib import Path
        from ckpt_tasks.checkpoint.memory.memory import MemoryDirectory
        held = MemoryDirectory(Path({str(root)!r}), "run")
        if {not forks} or os.fork() == 0:
            print("held", flush=True)
            time.sleep({60 if forks else 1})
        else:
            time.sleep(60)
    """
    with Python("-c", textwrap.dedent(code)) as process:
        assert process.stdout.readline() == "held\n"
        if forks:
            with running_on(Hurried(10)), pytest.raises(StoreError, match="another process"):
                MemoryDirectory(root, "run")
            process.send(signal.SIGKILL)
            process.wait()
        MemoryDirectory(root, "run").close(keep=False)
        if forks:
            os.killpg(process.pid, signal.SIGKILL)  # the worker
        process.wait()
