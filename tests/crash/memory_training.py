"""A training that saves every step into memory and storage, to be killed; it says what it is before each save."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.local_fs import Calls
from ckpt_tasks.testing import located
from tests.crash.memory_loop import SlowWrites

WIDTH = 512  # of the model; a weight is 1 MiB, so it and its moments take most of a copy's time
LARGE_BYTES = 1 << 16


def training() -> dict[str, Any]:
    """Make a model, an optimizer, fused: no version counter says when it wrote, its step waits; and plain values."""
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return {"model": model, "optimizer": optimizer, "plain": {"step": 0, "sums": torch.zeros(1 << 18)}}


def train_step(state: dict[str, Any], step: int) -> None:
    """Take a step that follows from the state and its number alone: no two of them leave any tensor alike."""
    state["optimizer"].zero_grad()
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    state["model"](batch).sub(batch.roll(1, 1)).square().mean().backward()
    state["optimizer"].step()
    state["plain"]["step"] = step
    state["plain"]["sums"] += step


def said_of(state: dict[str, Any]) -> str:
    """Say what a state is: its own step, and the digest of each of its tensors, by name."""
    kept = state["optimizer"].state_dict()["state"]
    names = [name for name, _ in state["model"].named_parameters()]
    tensors = {
        **state["model"].state_dict(),
        **{f"{names[number]}/{key}": value for number, held in kept.items() for key, value in held.items()},
        "sums": state["plain"]["sums"],
    }
    return " ".join([str(state["plain"]["step"]), *(f"{name}={digest}" for name, digest in digests(tensors).items())])


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: digest_hex(value.detach().reshape(-1).view(torch.uint8).numpy().data) for name, value in tensors.items()
    }


def lying(slot: Path) -> dict[str, str]:
    """Return the digests of the large tensors in the images of a slot, whether it has a seal or not."""
    found: dict[str, torch.Tensor] = {}
    for path in slot.glob("*.safetensors"):
        with suppress(SafetensorError):  # killed while it was made: it has no header yet, or not its size
            found |= load_file(path)
    return digests({name: value for name, value in found.items() if value.nbytes >= LARGE_BYTES})


def main(arguments: Sequence[str] | None = None) -> None:
    """Restore, say what was restored, and train; before every save say of what, and afterwards that it was taken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("memory_dir")
    parser.add_argument("--delay-s", type=float, default=0.0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    calls: Calls = SlowWrites(options.delay_s) if options.delay_s else os
    location = located(LocalStore(options.directory, calls=calls))
    ckpt = Checkpointer(
        CheckpointConfig(
            checkpoint_dir=location, memory_dir=options.memory_dir, step_interval=1, max_num_checkpoints=3,
        )
    )  # fmt: skip
    with ckpt:
        state = training()
        step = ckpt.restore(state)
        report = ckpt.last_restore
        say(f"restored {report.source if report else 'nothing'} {said_of(state)}")
        while True:
            step += 1
            train_step(state, step)
            say(f"step {said_of(state)}")
            ckpt.step(step, state)
            say(f"taken {step}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
