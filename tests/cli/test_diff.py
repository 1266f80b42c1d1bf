"""`ckpt diff`: exit status 0 when two states are equal bit for bit, else 1 and a table of what differs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks.checkpoint.restore.reading import open_run
from tests.support.cli_runs import ckpt, flip, only, save, save_steps


def save_seeded(run_dir: Path, state: dict[str, Any], step: int = 1) -> Path:
    torch.manual_seed(0)
    return save(run_dir, state, step)


def test_different_states_exit_with_1_and_a_table(tmp_path: Path) -> None:
    """P73: one changed bit anywhere makes the exit status 1, and the table says where and by how much."""
    a = save_seeded(tmp_path / "a", {"model": {"w": torch.zeros(3, 4)}, "note": {"[red]x": 1}})
    b = save_seeded(tmp_path / "b", {"model": {"w": torch.eye(3, 4) / 4}, "note": {"[red]x": 2}})
    answer = ckpt("diff", a, b)
    assert answer.status == 1
    row = next(line for line in answer.out.splitlines() if "model/w" in line)
    assert "3 of 12" in row
    assert "0.25" in row
    assert "note/[red]x" in answer.out
    data = ckpt("diff", a, b, "--json")
    assert data.status == 1
    assert data.data["equal"] is False
    assert [one["place"] for one in data.data["differences"]] == ["model/w", "note/[red]x"]
    assert data.data["differences"][0]["max_abs"] == 0.25


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_damaged_side_is_an_error(tmp_path: Path, side: str) -> None:
    """P49: damaged bytes are an error that names the object, exit status 2: not a difference, never equality."""
    for name in ("a", "b"):
        save_seeded(tmp_path / name, {"model": {"w": torch.zeros(3)}})
    shard = only(tmp_path / side, "checkpoint_*/*/model-*")
    flip(shard, shard.stat().st_size - 1)
    answer = ckpt("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert answer.status == 2
    assert answer.data["error"]["type"] == "IntegrityError"
    assert shard.name in answer.data["error"]["message"]


def test_groups_are_chosen_and_left_out(tmp_path: Path) -> None:
    """The exit status is that of the chosen groups: --group names them, --ignore leaves some out."""
    a = save_seeded(tmp_path / "a", {"model": {"w": torch.zeros(2)}, "position": {"n": 3}})
    torch.manual_seed(1)
    b = save(tmp_path / "b", {"model": {"w": torch.zeros(2)}, "position": {"n": 4}})
    assert ckpt("diff", a, b).status == 1
    assert ckpt("diff", a, b, "--group", "model").status == 0
    assert ckpt("diff", a, b, "--ignore", "rng").status == 1
    streams = ckpt("diff", a, b, "--ignore", "position")
    assert (streams.status, "Only random streams differ" in streams.out, "--ignore rng" in streams.out) == (
        1,
        True,
        True,
    )
    assert "Only random" not in ckpt("diff", a, b).out
    answer = ckpt("diff", a, b, "--ignore", "rng", "--ignore", "position", "--json")
    assert (answer.status, answer.data["equal"], [*answer.data["groups"]]) == (0, True, ["model"])
    answer = ckpt("diff", a, b, "--group", "position", "--group", "model", "--json")
    assert [one["place"] for one in answer.data["differences"]] == ["position/n"]


def test_metrics_are_compared(run_dir: Path) -> None:
    """--metrics compares the metrics of saves and evaluations; one that differs, or is of one side alone, counts."""
    save_steps(run_dir, 1, 2)
    run = open_run(str(run_dir))
    run.record_evaluation(run.find(2), "quick", {"odd": math.nan})
    one, two = f"{run_dir}@1", f"{run_dir}@2"
    assert "metrics" not in ckpt("diff", one, two, "--json").data
    same = ckpt("diff", two, two, "--metrics", "--json")
    assert (same.status, same.data["metrics"]["quick/odd"]) == (0, {"a": "nan", "b": "nan", "equal": True})
    answer = ckpt("diff", one, two, "--metrics", "--group", "rng", "--ignore", "model")
    assert answer.status == 1
    assert "-0.1667" in answer.out
    assert "Different in 2 of 2 metrics" in answer.out
    assert "Equal: 2 metrics" in ckpt("diff", two, two, "--metrics").out
