"""What a restore in a new process imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from ckpt_tasks import CheckpointConfig, Checkpointer

PROGRAM = """
import sys
import torch
from ckpt_tasks import CheckpointConfig, Checkpointer
run = sys.argv[1]
model = torch.nn.Linear(3000, 900)
state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
ckpt = Checkpointer(CheckpointConfig(checkpoint_dir=run))
before = {*sys.modules}
assert ckpt.restore(state) == 1
print(*sorted({*sys.modules} - before - {"encodings.ascii"}))
"""


def test_a_restore_imports_nothing(tmp_path: Path) -> None:
    """A restore imports no module: pyarrow.compute alone would double the time of a restore from memory."""
    run = str(tmp_path / "run")
    model = torch.nn.Linear(3000, 900)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3000)).sum().backward()
    optimizer.step()
    with Checkpointer(CheckpointConfig(checkpoint_dir=run)) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer})
    arguments = [sys.executable, "-c", PROGRAM, run]
    assert subprocess.run(arguments, check=True, capture_output=True, text=True).stdout == "\n"
