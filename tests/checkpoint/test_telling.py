"""The lines of a start: from which step it resumes, and where the first checkpoint is; on stderr, or in the log."""

from __future__ import annotations

import logging
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from tests.checkpoint.ranks.training import config, state_of
from tests.support.gang import Gang
from tests.support.interpreters import python
from tests.support.sweeps import quick_first

# The arguments: the run, the step at which a signal comes, its number, and the logging that the program sets.
TRAINING = """
import logging, os, signal, sys
import torch
from ckpt_tasks import CheckpointConfig, Checkpointer
run, memory, last, number, sets = sys.argv[1:]
exec(sets)
state = {"weights": torch.zeros(4)}
with Checkpointer(CheckpointConfig(checkpoint_dir=run, memory_dir=memory or None, step_interval=10)) as ckpt:
    for step in range(ckpt.restore(state) + 1, 31):
        ckpt.step(step, state)
        if step == 10:
            ckpt.wait()
        if step == int(last):
            os.kill(os.getpid(), int(number))
"""
SAVED = r"saved \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \((now|\d+ s ago)\), from"


def train(run: Path, last: int = -1, number: int = 0, sets: str = "", *, memory: str | Path = "") -> tuple[int, str]:
    done = python("-c", TRAINING, run, memory, last, number, sets)
    return done.returncode, done.stderr


def test_each_start_says_from_which_step(run_dir: Path, tmp_path: Path) -> None:
    """A start without logging has one line on stderr: the step, the time, the source and the number of lost steps.

    A stop by a signal has one too.
    """
    memory = tmp_path / "memory"
    memory.mkdir()
    new = f"ckpt: Training begins at step 0: {run_dir} has no checkpoint\nckpt: Step 10 is saved in {run_dir}\n"
    assert train(run_dir, 17, signal.SIGKILL, memory=memory) == (-signal.SIGKILL, new)
    for resumed, last, number, lost in (
        (10, 11, signal.SIGKILL, "the 7 steps after it are trained again"),
        (10, 12, signal.SIGTERM, "the 7 steps after it are trained again"),  # The one before died before a commit.
        (13, -1, 0, "no step is lost"),
    ):
        _, said = train(run_dir, last, number, memory=memory)
        line = f"ckpt: Resumed from step {resumed} of {run_dir}, {SAVED} memory; {lost}\n"
        ends = "ckpt: Step 13 is saved: the same command resumes it\n" * (number == signal.SIGTERM)
        assert re.fullmatch(line + ends, said), said
    ended = f"ckpt: Resumed from step 30 of {run_dir}, {SAVED} storage\nNothing was left.*\n"
    assert re.fullmatch(ended, train(run_dir)[1])

    early = tmp_path / "early"
    begun = f"ckpt: Training begins at step 0: {early} has no checkpoint"
    assert train(early, 7, signal.SIGKILL, memory=memory)[1] == f"{begun}\n"
    again = f"{begun}. An earlier process committed nothing, and its 7 steps are trained again\n"
    assert train(early, 3, signal.SIGKILL, memory=memory)[1] == again
    assert train(early, 5, signal.SIGKILL, memory=memory)[1] == again


@pytest.mark.parametrize(
    ("sets", "lines"),
    quick_first(
        [
            ("logging.basicConfig(level='INFO', format='LOG %(message)s')", "LOG Resumed from step 10 of"),
            ("logging.basicConfig(level='WARNING')", ""),
            ("logging.getLogger('ckpt_tasks').addHandler(logging.NullHandler())", ""),
            ("logging.getLogger('ckpt_tasks').setLevel('ERROR')", ""),
            ("logging.disable()", ""),
        ],
        3,
    ),
)
def test_the_logging_of_a_program_is_kept(run_dir: Path, sets: str, lines: str) -> None:
    """A program that has set its logging gets the line there at INFO, and nothing on stderr that its level omits."""
    train(run_dir, 17, signal.SIGKILL)
    status, said = train(run_dir, sets=sets)
    assert status == 0
    assert [line[: len(lines)] for line in said.splitlines() if "Resumed" in line] == [lines] * bool(lines)
    assert "ckpt: " not in said


@pytest.mark.parametrize(
    "sets", quick_first(["sys.stderr.close()", "sys.stderr = None", "os.dup2(os.open('/dev/full', 1), 2)"])
)
def test_a_line_that_cannot_be_written_costs_nothing(run_dir: Path, sets: str) -> None:
    """A start whose stderr is closed, missing or full trains to its end."""
    train(run_dir, 17, signal.SIGKILL)
    assert train(run_dir, sets=sets) == (0, "")
    assert Checkpointer(CheckpointConfig(checkpoint_dir=run_dir, memory_dir=None)).run.find("latest").step == 30


def test_a_later_restore_of_a_start_is_only_logged(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program that restores again (a retry, a rollback) has told the person already."""
    log = logging.getLogger("ckpt_tasks")
    state: dict[str, Any] = {"weights": torch.zeros(4)}
    log.propagate = False  # pytest's own handlers are the root's.
    try:
        with Checkpointer(CheckpointConfig(checkpoint_dir=run_dir, memory_dir=None)) as ckpt:
            ckpt.restore(state)
            ckpt.save(1, state)
            ckpt.restore(state)
    finally:
        log.propagate = True
    begun, saved = capsys.readouterr().err.splitlines()
    assert begun.startswith("ckpt: Training begins at step 0")
    assert saved == f"ckpt: Step 1 is saved in {run_dir}"


def resume(rank: int, size: int, root: str) -> None:
    state, said = state_of("ddp", size), Path(root, f"said-{rank}")
    with said.open("w") as out, Checkpointer(config(root)) as ckpt, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", out)
        step = ckpt.restore(state)
        ckpt.save(step + 1, state)


def test_rank_0_alone_tells(tmp_path: Path) -> None:
    """Two ranks tell each start once."""
    for lines in (["Training begins at step 0", "Step 1 is saved"], ["Resumed from step 1 of"]):
        with Gang(2, resume, str(tmp_path)) as gang:
            assert gang.end(60) == [0, 0]
        told = [line for line in (tmp_path / "said-0").read_text().splitlines() if line.startswith("ckpt: ")]
        assert len(told) == len(lines)
        assert all(line.startswith(f"ckpt: {begin}") for line, begin in zip(told, lines, strict=True)), told
        assert "ckpt: " not in (tmp_path / "said-1").read_text()
