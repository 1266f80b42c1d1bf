"""A user's plain script, as `ckpt verify-resume -- python script.py` runs it; options make it forget something."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer

forgets = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
own = torch.Generator().manual_seed(3)
if "chance" in forgets:
    own.seed()
state = {"model": model, "optimizer": optimizer, **({} if "generator" in forgets else {"own": own})}
config = CheckpointConfig(
    checkpoint_dir=os.environ["CKPT_RUN"], step_interval=2, max_num_checkpoints=2, memory_dir=None
)
with Checkpointer(config) as ckpt:
    for step in range(ckpt.restore(state) + 1, 17):
        loss = model(torch.randn(8, 4)).square().mean() * (1 + torch.rand((), generator=own))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
        ckpt.step(step, state, metrics={} if "quiet" in forgets else {"loss": loss.item()})
        ckpt.wait()
