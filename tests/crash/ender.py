"""A training of three steps that ends in the way it is told to; the next start says what is left of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence

import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.checkpoint.interrupt import held_back
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.testing import seal

STEPS = 3
SIZE = 1 << 14


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and end: `way` says how, `style` whether the Checkpointer is in a with block, closed, or left alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("location", type=json.loads)
    parser.add_argument("config", type=json.loads)
    parser.add_argument("way")
    parser.add_argument("style")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ckpt = Checkpointer(
        CheckpointConfig(
            checkpoint_dir=Location(**options.location), step_interval=1, max_num_checkpoints=None, **options.config
        )
    )
    if options.way == "daemon thread":
        thread = threading.Thread(target=train, args=(ckpt, 10**6), daemon=True)
        thread.start()
        while ckpt.position < STEPS:
            time.sleep(0.001)
        return
    if options.style == "with":
        with ckpt:
            train(ckpt, STEPS)
            end(ckpt, options.way)
    else:
        train(ckpt, STEPS)
        if options.style == "close":
            ckpt.close()
            left = [one.name for one in threading.enumerate() if one.name.startswith("ckpt-")]
            assert all(name.startswith("ckpt-io") for name in left), left
        end(ckpt, options.way)


def train(ckpt: Checkpointer, steps: int) -> None:
    """Take steps, each of which is saved."""
    weights = torch.zeros(SIZE)
    state = {"weights": weights, "step": 0}
    ckpt.restore(state)
    for step in range(1, steps + 1):
        weights += 1.0
        state["step"] = step
        ckpt.step(step, state)
        say(f"step {step}")


def end(ckpt: Checkpointer, way: str) -> None:
    """End this process, or train on until a signal ends it."""
    if way == "exception":
        raise RuntimeError("on purpose")
    if way == "sys.exit":
        sys.exit(3)
    if way in ("os._exit", "SIGTERM", "SIGINT", "SIGINT twice", "SIGKILL"):
        seal(ckpt)
        if way == "os._exit":
            os._exit(4)
        say("ready")
        while True:
            time.sleep(0.01)
            if held_back() is not None:
                if way == "SIGINT twice":
                    say("seen")
                    time.sleep(60)  # the second one does not wait for a step
                ckpt.step(ckpt.position + 1, {"weights": torch.full((SIZE,), 4.0), "step": ckpt.position + 1})


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
