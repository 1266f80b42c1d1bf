"""Threads that save in the background of training take only the time of the cores that training leaves."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.snapshot.memory import PrivateMemory
from tests.support.calls import WatchedCalls
from tests.support.interpreters import python
from tests.support.pipelines import give_calls


class Niceness(WatchedCalls):
    """Write down which thread does what, and how nice it is then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[str, str], int] = {}

    def look(self, what: str) -> None:
        self.seen[what, threading.current_thread().name] = own_niceness()

    def watched(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Pass a call on, and look."""

        def watching(*arguments: Any) -> Any:
            self.look(what)
            return call(*arguments)

        return watching

    def do(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        if name == "pwrite" and path.endswith(".safetensors"):
            self.look("put")
        return super().do(name, path, call)


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
    calls, state = Niceness(), {"weights": torch.ones(1 << 18)}
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=2, memory_dir=None)) as ckpt:
        ckpt.restore(state)
        give_calls(ckpt, calls)
        for what in ("take", "seal"):
            monkeypatch.setattr(PrivateMemory, what, calls.watched(what, getattr(PrivateMemory, what)))
        ckpt.step(1, state)
        for thread in threading.enumerate():
            if thread.name == "ckpt-take":
                thread.join()
        ckpt.step(2, state)
        ckpt.wait()
    assert own_niceness() == trainers
    assert {("take", "ckpt-take"), ("seal", "ckpt-seal"), ("put", "ckpt-flush")} <= {*calls.seen}
    assert {doing: niceness for doing, niceness in calls.seen.items() if niceness <= trainers} == {}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the process', not the thread's")
@pytest.mark.parametrize(("process", "thread"), [(5, 15), (12, 19)])
def test_a_process_that_is_nice_itself_has_nicer_threads(process: int, thread: int) -> None:
    """A trainer that gives way to others is not overtaken by what it saves with."""
    script = f"""
        import os, threading
        from ckpt_tasks.system import system
        lower_priority = system().lower_priority
        os.setpriority(os.PRIO_PROCESS, 0, {process})
        be_nice_in = threading.Thread(target=lambda: (lower_priority(), lower_priority(), print(os.getpriority(
            os.PRIO_PROCESS, threading.get_native_id()))))
        be_nice_in.start()
        be_nice_in.join()
        print(os.getpriority(os.PRIO_PROCESS, 0))
    """
    if process < own_niceness():
        pytest.skip("only root takes niceness back")
    done = python("-c", textwrap.dedent(script))
    assert done.stdout.split() == [str(thread), str(process)]
