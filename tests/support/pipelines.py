"""The tests of saves in the background of training share a state, a store that can be held up, and the commits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import located
from tests.support.calls import WatchedCalls
from tests.support.systems import Told, running_on

SIZE = 1 << 18


class Gate(WatchedCalls):
    """Let no object of a checkpoint be written before the gate is opened; `reached` is set when one waits."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.reached = threading.Event()

    def do(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        if name == "pwrite" and "/checkpoint_" in path:
            self.reached.set()
            self.opened.wait(60)
        return super().do(name, path, call)


class Refusing(WatchedCalls):
    """Let no object of a checkpoint be written."""

    def cut(self, fd: int, piece: object) -> object:
        if "/checkpoint_" in self.paths[fd]:
            raise OSError(28, "no room, on purpose")
        return piece


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Return calls that let nothing of a checkpoint be written before `opened` is set."""
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture
def clock() -> Iterator[Told]:
    with running_on(Told()) as told:
        yield told


def state_at(value: float) -> dict[str, Any]:
    """Return a state of a value."""
    return {"weights": torch.full((SIZE,), float(value)), "step": int(value)}


def opened(run_dir: Path, calls: Any = os, *, take_over: bool = False, **options: Any) -> Checkpointer:
    """Open a run whose store makes these calls, without a memory directory unless one is given."""
    options = {"step_interval": 1, "max_num_checkpoints": None, "memory_dir": None, **options}
    config = CheckpointConfig(checkpoint_dir=located(LocalStore(run_dir, calls=calls)), **options)
    return Checkpointer(config, take_over=take_over)


def give_calls(ckpt: Checkpointer, calls: Any) -> None:
    """Let a Checkpointer's store on the local disk make these calls from now on."""
    store = ckpt.run.history.store
    assert isinstance(store, LocalStore)
    ckpt.run.history.store = LocalStore(store.root, calls=calls)


def committed(run_dir: Path) -> list[int]:
    """List the committed steps, oldest first."""
    return [c.step for c in reversed(open_run(str(run_dir)).checkpoints())]


def restored(run_dir: Path, step: int | str = "latest") -> dict[str, Any]:
    """Return what a checkpoint restores."""
    run, state = open_run(str(run_dir)), state_at(-1)
    run.restore(run.find(step), state)
    return state
