"""Run directories to look at, and the command line called as a user calls it, in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import torch
import typer.testing
from typer.testing import CliRunner

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.cli import app
from ckpt_tasks.run.ledger.config import CheckpointConfig
from tests.support.interpreters import Python

typer.testing._get_command = cache(typer.testing._get_command)  # type: ignore[attr-defined]  # 35 ms each time


class Answer(NamedTuple):
    """What a verb printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


def ckpt(*arguments: str | Path) -> Answer:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Answer(done.exit_code, done.stdout, done.stderr)


def started(
    *arguments: object, said: IO[Any] | None = None, environment: Mapping[str, str] = MappingProxyType({})
) -> Python:
    """Start the command line in a process of its own; what it prints goes to the file `said`, if there is one."""
    code = "from ckpt_tasks.cli import main; main()"
    return Python("-c", code, *arguments, said=said, environment={**os.environ, **environment})


def config(run_dir: Path, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_dir=str(run_dir), **{"max_num_checkpoints": None, **options})


def some_state(step: int = 0) -> dict[str, Any]:
    torch.manual_seed(step)  # also the random streams, which are part of the state
    return {
        "model": {"weight": torch.randn(3, 4), "bias": torch.zeros(4)},
        "position": {"samples": 32 * step, "rate": 0.1},
    }


def save(run_dir: Path, state: Mapping[str, Any], step: int = 1) -> Path:
    """Save one state as the first checkpoint of a run."""
    with Checkpointer(config(run_dir)) as ckpt:
        ckpt.save(step, dict(state))
    return run_dir


def save_steps(run_dir: Path, *steps: int, **options: Any) -> Path:
    """Save the steps of one run in order, with the metric "loss" falling from step to step."""
    with Checkpointer(config(run_dir, **options)) as ckpt:
        for step in steps:
            ckpt.save(step, some_state(step), metrics={"loss": 1 / (1 + step)})
    return run_dir


def only(run_dir: Path, pattern: str) -> Path:
    """Return the one file of a run directory that matches."""
    (found,) = run_dir.glob(pattern)
    return found


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def tree(run_dir: Path) -> dict[str, bytes]:
    """Return every file of a run directory but the signs of life."""
    return {
        str(path.relative_to(run_dir)): path.read_bytes()
        for path in sorted(run_dir.rglob("*"))
        if path.is_file() and path.parent.name != "heartbeat"
    }
