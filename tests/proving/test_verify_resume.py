"""`verify_resume`: what goes on bit for bit is proved, and what does not is named."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ckpt_tasks.cli import app
from ckpt_tasks.errors import ConfigError, ProgramError
from ckpt_tasks.proving.proof import verify_resume

PROGRAMS = "tests.proving.programs"


def test_a_forgotten_counter_is_named() -> None:
    """P73: the first step that differs is the first after the resume, and the program's attribute is the cause."""
    done = CliRunner().invoke(app, ["verify-resume", f"{PROGRAMS}:Counting", "--steps", "6", "--json"])
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert not found["good"]
    assert found["killed_within"] == [4, 6]
    assert (found["difference"]["step"], found["difference"]["after_kills"]) == (3, 1)
    assert found["difference"]["what"][0] == "metric loss"
    assert "program.seen" in found["difference"]["cause"]


@pytest.mark.slow
def test_a_whole_state_is_proved() -> None:
    """P73: killed within two steps and resumed twice, every value of every step is equal; the status is 0."""
    done = CliRunner().invoke(app, ["verify-resume", f"{PROGRAMS}:Whole", "--steps", "9", "--set", "lr=0.1"])
    assert done.exit_code == 0, done.output
    assert "Every step is equal bit for bit" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "kills", "first", "named"),
    [
        ("OwnGenerator", 1, "metric loss", "program.noise (Generator)"),
        ("NoOptimizer", 1, "model", "program.optimizer (AdamW)"),
        ("Unseeded", 0, "metric loss", "not deterministic"),
        ("Drawing", 1, "rng/torch", "global random stream"),
    ],
)
def test_what_is_forgotten_is_named(program: str, kills: int, first: str, named: str) -> None:
    """P73: an object or a generator outside of the state, chance, and a draw at the start are told apart."""
    found = verify_resume(f"{PROGRAMS}:{program}", steps=6).difference
    assert found is not None
    assert found.after_kills == kills
    assert found.what[0].startswith(first)
    assert named in found.cause


def test_bad_orders_are_refused() -> None:
    """P50: too few steps, and a program that is not there, are errors that say so."""
    with pytest.raises(ConfigError, match="from 6 on"):
        verify_resume(f"{PROGRAMS}:Whole", steps=5)
    with pytest.raises(ProgramError, match="Absent"):
        verify_resume(f"{PROGRAMS}:Absent", steps=6)
