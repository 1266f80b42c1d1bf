"""Plain torch.save, as PyTorch's tutorial has it: one file, written again and again."""

from __future__ import annotations

import os

import torch

from benchmarks.comparison.shared import DIRECTORY, EVERY, STEPS, Steps, optimizer_of, prepare, shuffled, train_step

net, data = prepare()
optimizer = optimizer_of(net)
path, step = os.path.join(DIRECTORY, "checkpoint.pt"), 0
if os.path.exists(path):
    saved = torch.load(path)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
said = Steps(step)
while step < STEPS:
    for batch in shuffled(data):
        train_step(net, optimizer, batch)
        step += 1
        if step % EVERY == 0:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
        said.step()
        if step == STEPS:
            break
said.end(net)
