"""DataLoader workers within a flow's tasks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt_tasks.orchestration.hooks import attempted_task


@pytest.mark.usefixtures("harness")
def test_loader_workers_end_well_within_a_task() -> None:
    """P22: forked workers of a DataLoader can be used in a task, one loader after the other."""

    def read() -> list[float]:
        seen: list[float] = []
        for _ in range(3):
            loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=2)
            seen += [float(value) for (batch,) in loader for value in batch]
        return seen

    assert attempted_task(read, retries=0, retry_delay_s=0)() == [*map(float, range(8))] * 3
