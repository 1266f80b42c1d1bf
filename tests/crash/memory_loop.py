"""A loop that saves every step into memory and storage, to be killed; prints what it restored and each step."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.local_fs import Calls
from ckpt_tasks.testing import located
from tests.support.calls import WatchedCalls


class SlowWrites(WatchedCalls):
    """Let every write to a checkpoint's objects take its time, or for ever."""

    def __init__(self, delay_s: float):
        super().__init__()
        self._delay_s = delay_s

    def cut(self, fd: int, piece: Any) -> Any:
        if "/checkpoint_" in self.paths[fd]:
            time.sleep(self._delay_s)
        return piece


def state_of(step: int, size: int) -> dict[str, Any]:
    """Return a state of which every number follows from the step; several groups, so that a mixture would show."""
    return {
        "one": torch.full((size,), float(step)),
        "two": [torch.full((size // 2,), float(step + i)) for i in range(3)],
        "step": step,
    }


def step_of(state: dict[str, Any]) -> int:
    """Return the step that a state is of; raise AssertionError where it is of several."""
    step: int = state["step"]
    assert bool((state["one"] == float(step)).all()), "mixed"
    assert all(bool((value == float(step + i)).all()) for i, value in enumerate(state["two"])), "mixed"
    return step


def main() -> None:
    """Restore, check, and go on for `--steps` steps; SIGKILL at a step if asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("memory_dir")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=1 << 14)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--delay-s", type=float, default=0.0)
    options = parser.parse_args()
    calls: Calls = SlowWrites(options.delay_s) if options.delay_s else os
    location = located(LocalStore(options.directory, calls=calls))
    ckpt = Checkpointer(
        CheckpointConfig(
            checkpoint_dir=location,
            memory_dir=options.memory_dir,
            step_interval=1,
            max_num_checkpoints=3,
        )
    )
    with ckpt:
        state = state_of(0, options.size)
        step = ckpt.restore(state)
        assert step_of(state) == step
        report = ckpt.last_restore
        sys.stdout.write(f"restored {step} {report.source if report else ''}\n")
        for done, why in report.skipped if report else ():
            sys.stdout.write(f"skipped {done} {why}\n")
        sys.stdout.flush()
        until = step + options.steps
        while step < until:
            step += 1
            for name, value in state_of(step, options.size).items():
                if isinstance(value, torch.Tensor):
                    state[name].copy_(value)  # in place, as an optimizer does
                elif isinstance(value, list):
                    for live, new in zip(state[name], value, strict=True):
                        live.copy_(new)
                else:
                    state[name] = value
            ckpt.step(step, state)
            sys.stdout.write(f"step {step}\n")
            sys.stdout.flush()
            if step == options.kill_at:
                time.sleep(0.5)  # the snapshot is sealed by then
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
