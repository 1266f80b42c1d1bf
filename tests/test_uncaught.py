"""An error of ours that ends a script: its message first, then the script's own lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
import sys
{before}
from ckpt_tasks import Checkpointer
def train(value):
    with Checkpointer({config}) as ckpt:
        ckpt.save(1, {{"value": value}})
train(lambda: 1)
"""
LOOP = """
import os, signal, sys, torch
from ckpt_tasks import resumable
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 1)))
loader, epochs = resumable(sys.argv[1], data, range(3), model=model, optimizer=optimizer)
for epoch in epochs:
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if epochs.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
"""
CONFIG = '__import__("ckpt_tasks").CheckpointConfig(checkpoint_dir=sys.argv[1])'


def said(run_dir: Path, before: str = "", **environment: str) -> str:
    place = run_dir.parent / "script.py"
    place.write_text(SCRIPT.format(before=before, config=CONFIG))
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, place, run_dir], env=surroundings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    return done.stderr


def test_the_message_comes_first_and_no_frame_of_ours(run_dir: Path) -> None:
    """The error's line stands above the script's frames, and CKPT_TRACEBACK=1 brings back Python's own traceback."""
    short = said(run_dir)
    message, _, frames = short.partition("\n")
    assert message.startswith("ckpt_tasks.errors.UnsupportedStateError: a value of type function cannot be stored (at ")
    assert frames.count("script.py") == 2
    assert "ckpt_tasks/" not in frames.replace("ckpt_tasks, too", "")
    whole = said(run_dir, CKPT_TRACEBACK="1")
    assert whole.startswith("Traceback")
    assert "ckpt_tasks/checkpoint/" in whole


def test_a_ctrl_c_shows_the_programs_frames(run_dir: Path) -> None:
    """A Ctrl-C that ends a loop of ours with a commit prints the program's own line, and Python's status stays."""
    place = run_dir.parent / "loop.py"
    place.write_text(LOOP)
    done = subprocess.run(
        [sys.executable, place, run_dir], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGINT
    _, _, said = done.stderr.decode().partition("KeyboardInterrupt")
    assert b"Step 3 is saved" in done.stderr
    assert said.count("loop.py") == 1
    assert "ckpt_tasks/" not in said.replace("ckpt_tasks, too", "")


@pytest.mark.slow
def test_a_hook_of_the_program_stays(run_dir: Path) -> None:
    """A program that shows errors by its own hook keeps it."""
    own = "sys.excepthook = lambda kind, error, trace: print('mine', file=sys.stderr)"
    assert said(run_dir, own) == "mine\n"
