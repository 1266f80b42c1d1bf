"""A user's plain script, as `ckpt verify-resume -- python script.py` runs it; options make it forget something."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.system import system


class Wrong:
    """A script that notices one kind of fault, and computes something else from then on."""

    INSIDE = ("slow store", "failing store", "clock ahead", "clock back")

    def __init__(self, fault: str):
        self._fault = fault
        self._seen = Path(os.environ["CKPT_RUN"]).with_suffix(".seen")
        numbers = {"terminate": signal.SIGTERM, "pause": signal.SIGCONT, "full disk": signal.SIGXFSZ}
        if fault in numbers:
            signal.signal(numbers[fault], self._note)

    def _note(self, number: int, frame: object) -> None:
        self._seen.mkdir(exist_ok=True)  # A full disk has room for it.
        if number == signal.SIGTERM:
            sys.exit(1)

    def has_met(self) -> bool:
        """Return whether the fault has been met, in this process or an earlier one."""
        if self._fault in self.INSIDE and "CKPT_CHAOS_FAULTS" in os.environ:
            faults = json.loads(Path(os.environ["CKPT_CHAOS_FAULTS"]).read_text())
            off_s = system().time() - time.time()
            now = faults["delay_s"] > 0, faults["failing"] > 0, off_s > 60, off_s < -60
            if now[self.INSIDE.index(self._fault)]:
                self._seen.mkdir(exist_ok=True)
        return self._seen.exists()


forgets = sys.argv[1:]
STEPS = 201 if "longer" in forgets else 61 if "long" in forgets else 17
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
own = torch.Generator().manual_seed(3)
if "chance" in forgets:
    own.seed()
wrong = Wrong(sys.argv[-1])  # The last word may be a kind of fault.
state = {"model": model, "optimizer": optimizer, **({} if "generator" in forgets else {"own": own})}
config = CheckpointConfig(
    checkpoint_dir=os.environ["CKPT_RUN"], step_interval=2, max_num_checkpoints=2, memory_dir=None
)
with Checkpointer(config) as ckpt:
    for step in range(ckpt.restore(state) + 1, STEPS):
        if wrong.has_met():
            torch.rand((), generator=own)
        loss = model(torch.randn(8, 4)).square().mean() * (1 + torch.rand((), generator=own))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
        ckpt.step(step, state, metrics={} if "quiet" in forgets else {"loss": loss.item()})
        ckpt.wait()
