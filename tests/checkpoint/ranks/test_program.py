"""The example program under torchrun: killed, and gone on with as many ranks, or with one more."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.errors import CkptError
from ckpt_tasks.flows.programs.byte_lm import Transformer
from ckpt_tasks.flows.programs.fsdp_lm import CONTEXT
from tests.checkpoint.ranks.training import digests, steps_of

STEPS = 30
INTERVAL = 5
_WAIT_S = 300.0


def start(root: Path, ranks: int) -> subprocess.Popen[str]:
    """Start the program as its page says."""
    program = ["-m", "ckpt_tasks.flows.programs.fsdp_lm", "--steps", str(STEPS), "--step-interval", str(INTERVAL)]
    return torchrun(root, ranks, *program, "--checkpoint-dir", str(root))


def torchrun(root: Path, ranks: int, *program: str) -> subprocess.Popen[str]:
    """Start a program on many ranks; torchrun picks a free port."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=root.parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


def train(root: Path, ranks: int) -> str:
    """Run the program to its end; return what it printed."""
    with start(root, ranks) as agent:
        said, _ = agent.communicate(timeout=_WAIT_S)
    assert agent.returncode == 0, said
    return said


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill(root: Path, *, all_of_them: bool) -> None:
    """Kill a training on two ranks once it has committed step 10: rank 1 alone, or everything at once."""
    with start(root, 2) as agent:
        end_s = time.monotonic() + _WAIT_S
        while newest(root) < 2 * INTERVAL:
            assert agent.poll() is None, agent.communicate()
            assert time.monotonic() < end_s
            time.sleep(0.01)
        ranks = children(agent.pid)
        assert len(ranks) == 2
        for pid in [agent.pid, *ranks] if all_of_them else ranks[1:]:
            os.kill(pid, signal.SIGKILL)
        said, _ = agent.communicate(timeout=_WAIT_S)
        assert agent.returncode != 0
    assert all_of_them or "SIGKILL" in said
    while any(map(runs, ranks)):  # A killed process needs a moment to end.
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert 2 * INTERVAL <= newest(root) < STEPS


def runs(pid: int) -> bool:
    """Say whether a process is there, and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def newest(root: Path) -> int:
    try:
        return max((checkpoint.step for checkpoint in open_run(root).checkpoints()), default=0)
    except CkptError:  # there is no run yet
        return 0


def at_the_end(root: Path) -> dict[str, str]:
    """Restore the last step in one process; return digests of all that it holds."""
    run = open_run(root)
    checkpoint = run.checkpoints()[0]
    assert checkpoint.step == STEPS
    model = Transformer(CONTEXT, d_model=96, n_layers=2, n_heads=4, dropout=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.restore(checkpoint, {"model": model, "optimizer": optimizer}, partial=True)
    return digests(model, optimizer)


@pytest.mark.slow
def test_the_example_program_survives_torchrun(tmp_path: Path) -> None:
    """P55, P58: killed as a whole, or one rank of it, two ranks end bit for bit as if not; and three ranks go on."""
    train(tmp_path / "whole", 2)
    for all_of_them in (True, False):
        root = tmp_path / f"killed-{all_of_them}"
        kill(root, all_of_them=all_of_them)
        train(root, 2)
        assert at_the_end(root) == at_the_end(tmp_path / "whole")
    root = tmp_path / "three"
    kill(root, all_of_them=True)
    said = train(root, 3)
    assert re.search(rf"step {STEPS} on 3 ranks: loss \d\.\d+", said)
    assert steps_of(root)[-1] == STEPS
