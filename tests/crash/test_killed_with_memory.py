"""A loop that saves every step, killed at random moments: memory and storage together never go back."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt_tasks import open_run
from ckpt_tasks.checkpoint.upkeep import verify_run_directory


@pytest.mark.parametrize("kills", [6, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.timeout(3000)
def test_killed_at_random_moments(run_dir: Path, memory: Path, kills: int) -> None:
    """P1, P30: killed anywhere, what comes back is one moment of training, and never an older one than before."""
    chance = random.Random(11)
    command = [sys.executable, "-m", "tests.crash.memory_loop", str(run_dir), str(memory), "--size", str(1 << 19)]
    newest, from_memory = 0, 0
    for number in range(kills):
        delay = ["--delay-s", "0.02"] if number % 2 else []
        with subprocess.Popen([*command, *delay], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            first = process.stdout.readline()  # the loop itself checks that the state is of one step
            assert first.startswith("restored"), process.stderr.read()
            time.sleep(chance.uniform(0, 0.4))
            process.kill()
            steps = [int(line.split()[1]) for line in process.stdout.read().splitlines() if line.startswith("step ")]
        restored = int(first.split()[1])
        assert restored >= newest
        from_memory += str(memory) in first
        committed = [c.step for c in reversed(open_run(str(run_dir)).checkpoints())]
        newest = max([restored, *committed[-1:]])
        assert committed == sorted(committed)
        assert not steps or steps[0] == restored + 1
    assert from_memory > 0
    faults = verify_run_directory(open_run(str(run_dir)).history)
    assert faults.good
