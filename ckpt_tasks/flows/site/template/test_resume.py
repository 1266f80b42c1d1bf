"""Train once without a break and once with a kill: `python -m pytest`. Both results must be equal bit for bit."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from ckpt_tasks import open_run
from ckpt_tasks.errors import CheckpointNotFoundError

STEPS, EVERY = 3_000, 100  # So many steps that a kill after the first save finds the training running.
CKPT = Path(sys.executable).with_name("ckpt")


def start(run: Path) -> subprocess.Popen[bytes]:
    """Start training in this directory, as you would."""
    options = ["--steps", str(STEPS), "--step-interval", str(EVERY), "--checkpoint-dir", str(run)]
    return subprocess.Popen([CKPT, "train", "training:Training", *options], cwd=Path(__file__).parent)


def saved(run: Path) -> int:
    """Return the newest saved step, 0 without one."""
    try:
        return open_run(str(run)).find("latest").step
    except CheckpointNotFoundError:
        return 0


def test_killed_and_resumed(tmp_path: Path) -> None:
    """A training that is killed and started again ends with the same bits as one that was not disturbed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait() == 0
    training = start(killed)
    while saved(killed) < EVERY:
        assert training.poll() is None, "it ended before it could be killed: raise STEPS"
        time.sleep(0.01)
    training.kill()
    assert training.wait() != 0, "it ended before it could be killed: raise STEPS"
    assert 0 < saved(killed) < STEPS
    assert start(killed).wait() == 0
    assert subprocess.run([CKPT, "diff", f"{whole}@{STEPS}", f"{killed}@{STEPS}"], check=False).returncode == 0
