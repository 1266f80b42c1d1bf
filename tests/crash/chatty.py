"""A training that logs with every step, and whose output breaks in step BREAKS; nobody reads it any more, or can."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence

import torch

from ckpt_tasks import CheckpointConfig, Checkpointer

BREAKS, STEPS = 4, 9


def become(end: int) -> None:
    os.dup2(end, 1)
    os.dup2(end, 2)


def leave() -> None:
    reading, writing = os.pipe()
    become(writing)
    os.close(reading)


def close() -> None:
    sys.stdout.close()
    sys.stderr.close()


def have_none() -> None:
    sys.stdout = sys.stderr = None


# How standard output and error become of no use.
WAYS: dict[str, Callable[[], object]] = {
    "its reader left": leave,
    "its disk is full": lambda: become(os.open("/dev/full", os.O_WRONLY)),
    "its descriptor is closed": lambda: os.closerange(1, 3),
    "it is closed": close,
    "there is none": have_none,
}


def main(arguments: Sequence[str]) -> None:
    """Train in a loop of a program that logs with rich, and leaves the Checkpointer open or not."""
    run_dir, way, entry = arguments
    config = CheckpointConfig(checkpoint_dir=run_dir, step_interval=1, memory_dir=None)
    if entry == "close":
        from rich.console import Console
        from rich.logging import RichHandler

        logging.basicConfig(level=logging.INFO, handlers=[RichHandler(console=Console(stderr=True))])
    ckpt = Checkpointer(config)
    state = {"weights": torch.zeros(64), "step": 0}
    for step in range(ckpt.restore(state) + 1, STEPS + 1):
        if step == BREAKS:
            WAYS[way]()
        state["step"] = step
        ckpt.step(step, state)
        logging.getLogger("ckpt_tasks").warning("step %d", step)
    if entry == "close":
        ckpt.close()


if __name__ == "__main__":
    main(sys.argv[1:])
