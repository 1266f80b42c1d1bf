"""An error of ours that ends a script: its message first, then the script's own lines."""

from __future__ import annotations

import os
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


@pytest.mark.slow
def test_a_hook_of_the_program_stays(run_dir: Path) -> None:
    """A program that shows errors by its own hook keeps it."""
    own = "sys.excepthook = lambda kind, error, trace: print('mine', file=sys.stderr)"
    assert said(run_dir, own) == "mine\n"
