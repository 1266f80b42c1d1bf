"""Train a small model and save every step of it; say at two of them what the process holds."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.testing import settle
from tests.support.resources import held


def training() -> dict[str, Any]:
    """Make a model with parameters large and small and buffers (1 MiB with its moments), and its optimizer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(128, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 32))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def main() -> None:
    """Save `--steps` steps, each one committed before the next; print what is held after `--first` and at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("memory_dir")
    parser.add_argument("--first", type=int)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = training()
    config = CheckpointConfig(
        checkpoint_dir=options.run_dir,
        memory_dir=options.memory_dir,
        step_interval=1,
        max_num_checkpoints=2,
    )
    with Checkpointer(config) as ckpt:
        for step in range(1, options.steps + 1):
            state["optimizer"].zero_grad()
            state["model"](torch.randn(4, 128)).square().mean().backward()
            state["optimizer"].step()
            ckpt.wait()
            assert (ckpt.last_commit.step if ckpt.last_commit else 0) == step - 1
            assert ckpt.step(step, state)
            if step in (options.first, options.steps):
                ckpt.wait()
                settle(ckpt)
                sys.stdout.write(json.dumps(held(Path(options.memory_dir))._asdict()) + "\n")
        settle(ckpt)
        assert [c.step for c in ckpt.checkpoints()] == [options.steps, options.steps - 1]


if __name__ == "__main__":
    main()
