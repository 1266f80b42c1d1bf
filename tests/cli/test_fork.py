"""`ckpt fork`: one command, and a run of its own; and what `ckpt show` and `ckpt ls` say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.cli.copy import parse_changes
from ckpt_tasks.errors import ConfigError
from tests.support.cli_runs import ckpt, save_steps
from tests.support.forks import train


def test_a_fork_is_one_command(run_dir: Path, tmp_path: Path) -> None:
    """A table says from where to where, at which step, how the bytes came, what was set, and what to do next."""
    train(run_dir, 2, {"lr": 0.02})
    train(run_dir, 4, {"lr": 0.02})
    answer = ckpt("fork", f"{run_dir}@2", tmp_path / "b", "--param", "lr=1e-4", "--param", "schedule=step")
    assert answer.status == 0, answer.err
    for words in (str(run_dir), str(tmp_path / "b"), "in files of both runs", "lr = 0.0001 (was 0.02)", '"step"'):
        assert words in answer.out
    assert (
        f"train tests.support.forks:Scheduled --steps 4 --run-key b --checkpoint-dir {tmp_path / 'b'}\n" in answer.out
    )
    for verb in ("ls", "show"):
        shown = ckpt(verb, tmp_path / "b", "--json").data
        assert (shown["origin"]["url"], shown["origin"]["set"]) == (str(run_dir), {"lr": 1e-4, "schedule": "step"})
        assert shown["params"] == {"lr": 1e-4, "schedule": "step"}
        assert ckpt(verb, run_dir, "--json").data["origin"] is None
    assert f"Forked from run ({run_dir}) at step 2, with lr=0.0001" in " ".join(ckpt("ls", tmp_path / "b").out.split())
    assert ckpt("verify", tmp_path / "b").status == 0
    assert ckpt("diff", f"{run_dir}@2", f"{tmp_path / 'b'}@2").status == 0
    again = ckpt("fork", f"{run_dir}@2", tmp_path / "b", "--param", "lr=1e-4", "--param", "schedule=step")
    assert (again.status, "There already" in again.out) == (0, True)  # as after an interruption


def test_a_plain_loop_is_forked_too(run_dir: Path, tmp_path: Path) -> None:
    """Without --param a run that no flow has trained is forked, and goes on in a loop."""
    save_steps(run_dir, 1)
    forked = ckpt("fork", run_dir, tmp_path / "b")
    assert forked.status == 0
    assert f"your loop, with CheckpointConfig(checkpoint_dir='{tmp_path / 'b'}')" in forked.out


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3", 3),
        ("true", True),
        ("null", None),
        ("[0.9, 0.98]", [0.9, 0.98]),
        ('"True"', "True"),
        ("cosine", "cosine"),
        ("", ""),
        ("a=b", "a=b"),
        ("{broken", "{broken"),
    ],
)
def test_values_are_json_or_texts(text: str, value: Any) -> None:
    """A value is what JSON says; what is none is the text itself."""
    assert parse_changes([f"x={text}"]) == {"x": value}


@pytest.mark.parametrize("text", ["True", "None", ".5", "1_000", "+3", "nan", "NaN", "Infinity", "-inf", "1e999", "5."])
def test_values_that_only_look_like_json_are_refused(text: str) -> None:
    """Python's words and numbers that JSON writes otherwise would become texts, and be noticed late."""
    with pytest.raises(ConfigError):
        parse_changes([f"x={text}"])
