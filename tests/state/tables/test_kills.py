"""The two-tower example, killed at random moments: it goes on bit for bit, and with another number of ranks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import open_run
from ckpt_tasks.flows.programs.two_tower import TwoTower
from tests.checkpoint.ranks.test_program import children, newest, torchrun
from tests.support.tables import about

STEPS = 60
_PROGRAM = ("-m", "ckpt_tasks.flows.programs.two_tower", "--steps", str(STEPS), "--step-interval", "3")


def start(root: Path, ranks: int) -> subprocess.Popen[str]:
    if ranks > 1:
        return torchrun(root, ranks, *_PROGRAM, "--checkpoint-dir", str(root))
    return subprocess.Popen(
        [sys.executable, *_PROGRAM, "--checkpoint-dir", str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=root.parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


def finish(root: Path, ranks: int) -> None:
    with start(root, ranks) as agent:
        said, _ = agent.communicate(timeout=300)
    assert agent.returncode == 0, said


def kill(root: Path, ranks: int, after_s: float) -> None:
    """Kill all of a training a moment after it has committed one more step than there was."""
    before = newest(root)
    with start(root, ranks) as agent:
        while newest(root) == before:
            assert agent.poll() is None, agent.communicate()
            time.sleep(0.01)
        time.sleep(after_s)
        for pid in [agent.pid, *(children(agent.pid) if ranks > 1 and agent.poll() is None else ())]:
            os.kill(pid, signal.SIGKILL)
        agent.communicate(timeout=60)


def at_the_end(root: Path) -> Any:
    """Return all that the last step has, read by one process."""
    program, run = TwoTower(), open_run(str(root))
    checkpoint = run.checkpoints()[0]
    assert checkpoint.step == STEPS
    run.restore(checkpoint, program.state, partial=True)
    dense = {name: value.tolist() for name, value in program.tops.state_dict().items()}
    return about(program.users), about(program.items), dense


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_training_ends_as_one_that_was_not(tmp_path: Path, ranks: int) -> None:
    """Killed again and again at random moments, the tables end bit for bit as those of a training that ran through."""
    finish(tmp_path / "whole", ranks)
    chance = random.Random(ranks)
    for _ in range(5):
        if newest(tmp_path / "killed") < STEPS - 6:
            kill(tmp_path / "killed", ranks, chance.uniform(0, 0.6))
    finish(tmp_path / "killed", ranks)
    assert at_the_end(tmp_path / "killed") == at_the_end(tmp_path / "whole")
