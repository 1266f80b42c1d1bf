"""What saves take of memory, beside the state and the snapshots of it."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_log = logging.getLogger(__name__)

_STATE_BYTES = 256 << 20
_MOST_BYTES = 96 << 20  # measured: 28; one more copy of one group of the state would be 128

_TRAINING = r"""
import re, sys
from pathlib import Path
import torch
from torch import nn
from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.testing import settle

def status(field):  # not ru_maxrss: that remembers the memory of the process which started this one
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

run_dir, memory_dir, state_bytes = *sys.argv[1:3], int(sys.argv[3])
model = nn.ParameterList([nn.Parameter(torch.full((state_bytes // 64,), float(n))) for n in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)  # steps take no memory
for parameter in model:
    parameter.grad = torch.ones_like(parameter)
optimizer.step()  # the moments are there: half of the state
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
config = CheckpointConfig(
    checkpoint_dir=run_dir, memory_dir=memory_dir, step_interval=1, max_num_checkpoints=1
)
with Checkpointer(config) as ckpt:
    for step in range(1, 6):
        ckpt.step(step, {"model": model, "optimizer": optimizer})
        optimizer.step()
        if step % 2:
            ckpt.wait()
            settle(ckpt)  # after the other steps the next snapshot is taken while this one is being written
    ckpt.wait()
    assert [commit.step for commit in ckpt.checkpoints()] == [5]  # the others were read back and removed
    print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_saves_need_two_snapshots_of_the_state_and_a_few_buffers(fast_dir: Path) -> None:
    """P44: the peak of memory in a training with saves is the state, two snapshots and some pieces that are written."""
    if shutil.disk_usage(fast_dir).free < 4 * _STATE_BYTES:
        pytest.skip(f"no room for two snapshots and what is saved in {fast_dir}")
    run_dir, memory_dir = fast_dir / "peak", fast_dir / "peak-memory"
    memory_dir.mkdir()
    command = [sys.executable, "-c", _TRAINING, str(run_dir), str(memory_dir), str(_STATE_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    shutil.rmtree(memory_dir)
    shutil.rmtree(run_dir)
    assert done.returncode == 0, done.stderr[-4000:]
    above_bytes = int(done.stdout) - 2 * _STATE_BYTES
    _log.info("%.1f MiB beside two snapshots", above_bytes / 2**20)
    assert -_STATE_BYTES // 2 < above_bytes < _MOST_BYTES  # both snapshots were there
