"""A small DQN, with its environment and its replay buffer in the state, that kills itself in a step if asked."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, ReplayBuffer


def main(directory: str, steps: int, kill_at: int) -> None:
    """Train to `steps`, saving every third; print the loss of each step, and at the end all that the buffer has."""
    torch.manual_seed(3)
    net, chance, place = nn.Linear(4, 2), np.random.default_rng(5), {"x": torch.randn(4)}
    optimizer, vector = torch.optim.Adam(net.parameters(), lr=0.01), (torch.float32, (4,))
    replay = ReplayBuffer(40, x=vector, action=torch.int64, reward=torch.float32, then=vector, done=bool)
    state: dict[str, Any] = {"net": net, "optimizer": optimizer, "environment": place, "chance": chance}
    generator = torch.Generator()
    state |= {"replay": replay, "generator": generator}
    with Checkpointer(CheckpointConfig(checkpoint_dir=directory, step_interval=3)) as ckpt:
        for step in range(ckpt.restore(state) + 1, steps + 1):
            action = int(net(place["x"]).argmax()) if chance.random() < 0.8 else int(chance.integers(2))
            then = 0.9 * place["x"] + 0.1 * torch.randn(4) + (action - 0.5)
            done = bool(then.norm() > 2)
            replay.append(x=place["x"], action=action, reward=-then.norm(), then=then, done=done)
            place["x"] = torch.randn(4) if done else then
            rows = replay.sample(8, generator if step % 2 else None)
            with torch.no_grad():
                wanted = rows["reward"] + 0.9 * ~rows["done"] * net(rows["then"]).amax(1)
            loss = (net(rows["x"]).gather(1, rows["action"][:, None])[:, 0] - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sys.stdout.write(f"{step} {loss.item().hex()}\n")
            if step == kill_at:
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            ckpt.step(step, state)
    sys.stdout.write(f"{[(name, replay.values[name].tolist()) for name in replay.columns]}\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
