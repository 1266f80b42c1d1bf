"""The garbage collector: paused where many objects are made, and never left otherwise than it was."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.gc_pause import gc_paused
from ckpt_tasks.state.capture import capture
from tests.support.roundtrip import restore, save


@pytest.mark.parametrize("collecting", [True, False])
def test_the_garbage_collector_is_as_it_was(collecting: bool) -> None:
    """P11: capture and restore pause it, and leave it on or off as the program had it, also after an error."""
    (gc.enable if collecting else gc.disable)()
    try:
        restore(save({"it": 1}), {"it": 2})
        with pytest.raises(UnsupportedStateError):
            capture({"it": object()})
        assert gc.isenabled() == collecting
    finally:
        gc.enable()


def test_the_garbage_collector_does_not_look_at_many_tensors_again_and_again(run_dir: Path) -> None:
    """P42: of 4,000 tensors, a save makes 20,000 objects that all stay; the collector looks a few times in each thread.

    It would look at all of them dozens of times, and half of a save's time would be its.
    """
    state = {"table": {f"row{n}": torch.full((4,), float(n)) for n in range(4000)}}
    looked: Counter[str] = Counter()

    def look(phase: str, _: object) -> None:
        looked[threading.current_thread().name] += phase == "start"

    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=1)) as checkpointer:
        checkpointer.step(1, state)
        checkpointer.wait()
        gc.collect()
        gc.callbacks.append(look)
        try:
            checkpointer.step(2, state)
            checkpointer.wait()
        finally:
            gc.callbacks.remove(look)
    assert max(looked.values(), default=0) <= 8, looked


def test_a_pause_lasts_until_its_own_end() -> None:
    """P42: a flush that ends its pause does not end that of a capture in another thread, nor the other way round."""
    seen: list[bool] = []
    paused, done = threading.Event(), threading.Event()

    def pause() -> None:
        with gc_paused():
            paused.set()
            done.wait(60)
            seen.append(gc.isenabled())

    thread = threading.Thread(target=pause)
    with gc_paused():
        thread.start()
        paused.wait(60)
    seen.append(gc.isenabled())  # ours has ended first
    done.set()
    thread.join()
    assert seen == [False, False]
    assert gc.isenabled()


def test_a_child_that_is_forked_during_a_pause_has_its_garbage_collector() -> None:
    """P11: a worker of a DataLoader, forked while a thread of ours has it paused, would never collect anything."""
    paused, done = threading.Event(), threading.Event()

    def pause() -> None:
        with gc_paused():
            paused.set()
            done.wait(60)

    thread = threading.Thread(target=pause)
    thread.start()
    paused.wait(60)
    try:
        child = os.fork()
        if not child:
            os._exit(gc.isenabled())
        _, status = os.waitpid(child, 0)
    finally:
        done.set()
        thread.join()
    assert os.waitstatus_to_exitcode(status) == 1
