"""DataLoader workers within a flow's tasks."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: this one may know already how to keep Prefect out of forks.
LOADING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from ckpt_tasks.orchestration.hooks import attempted_task

def read():
    for _ in range(3):
        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=2)
        print([int(value) for (batch,) in loader for value in batch])

attempted_task(read, retries=0, retry_delay_s=0)()
"""


def test_loader_workers_end_well_within_a_task(server: dict[str, str]) -> None:
    """P22: forked workers of a DataLoader can be used in a task, one loader after the other."""
    done = subprocess.run([sys.executable, "-c", LOADING], env=server, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 1, 2, 3, 4, 5, 6, 7]"] * 3
