"""Threads that save in the background of training take only the time of the cores that training leaves."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.checkpoint.memory.memory import PrivateMemory
from ckpt_tasks.storage.local import LocalStore


def own_niceness() -> int:
    """Return the niceness of the calling thread; on Linux each has its own."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the process', not the thread's")
def test_every_thread_that_saves_is_nicer_than_the_one_that_trains(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is made ready, digested, sealed and put by threads that give way to training, which stays as it was."""
    trainers = own_niceness()
    if trainers == 19:
        pytest.skip("these tests give way to others as much as our threads can")
    state, seen = {"weights": torch.ones(1 << 18)}, dict[tuple[str, str], int]()

    def watch(owner: type, name: str) -> None:
        call = getattr(owner, name)

        def watching(*arguments: Any) -> Any:
            seen[name, threading.current_thread().name] = own_niceness()
            return call(*arguments)

        monkeypatch.setattr(owner, name, watching)

    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=2, memory_dir=None)) as ckpt:
        ckpt.restore(state)
        for owner, name in ((PrivateMemory, "take"), (PrivateMemory, "seal"), (LocalStore, "put")):
            watch(owner, name)
        ckpt.step(1, state)
        for thread in threading.enumerate():
            if thread.name == "ckpt-take":
                thread.join()
        ckpt.step(2, state)
        ckpt.wait()
    assert own_niceness() == trainers
    assert {("take", "ckpt-take"), ("seal", "ckpt-seal"), ("put", "ckpt-flush")} <= {*seen}
    assert {doing: niceness for doing, niceness in seen.items() if niceness <= trainers} == {}
