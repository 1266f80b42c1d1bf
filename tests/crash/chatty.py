"""A training that logs with every step, and whose output breaks in step BREAKS; nobody reads it any more, or can."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from tests.support.tiny import Tiny

BREAKS, STEPS = 4, 9


class Chatty(Tiny):
    """The same as a program of a flow."""

    def __init__(self, way: str):
        super().__init__()
        self._way = way

    def _interfere(self, step: int) -> None:
        if step == BREAKS:
            break_output(self._way)
        logging.getLogger("ckpt_tasks").warning("step %d", step)


def break_output(way: str) -> None:
    """Let standard output and error be of no use: `way` says how."""
    if way == "its reader left":
        reading, writing = os.pipe()
        for descriptor in (1, 2):
            os.dup2(writing, descriptor)
        os.close(reading)
    elif way == "its disk is full":
        for descriptor in (1, 2):
            os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
    elif way == "its descriptor is closed":
        os.close(1)
        os.close(2)
    elif way == "it is closed":
        sys.stdout.close()
        sys.stderr.close()
    else:
        sys.stdout = sys.stderr = None


def train(ckpt: Checkpointer, way: str) -> None:
    """Train in a plain loop."""
    state = {"weights": torch.zeros(64), "step": 0}
    for step in range(ckpt.restore(state) + 1, STEPS + 1):
        if step == BREAKS:
            break_output(way)
        state["step"] = step
        ckpt.step(step, state)
        logging.getLogger("ckpt_tasks").warning("step %d", step)


def main(arguments: Sequence[str]) -> None:
    """Train as `entry` says, logging to `log`."""
    run_dir, way, entry, log = arguments
    if log == "rich":
        from rich.console import Console
        from rich.logging import RichHandler

        logging.basicConfig(level=logging.INFO, handlers=[RichHandler(console=Console(stderr=True))])
    elif log == "stderr":
        logging.basicConfig(level=logging.INFO)
    config = CheckpointConfig(checkpoint_dir=run_dir, step_interval=1, memory_dir=None)
    if entry == "flow":
        from ckpt_tasks.flows.train import train as flow

        flow(
            run_key="chatty",
            total_steps=STEPS,
            checkpoint=config,
            program="tests.crash.chatty:Chatty",
            params={"way": way},
            batch_steps=3,
        )
        return
    ckpt = Checkpointer(config)
    if entry == "with":
        with ckpt:
            train(ckpt, way)
        return
    train(ckpt, way)
    if entry == "close":
        ckpt.close()


if __name__ == "__main__":
    main(sys.argv[1:])
