"""`ckpt import`: one command from a file of others to a run, and one line when it cannot be done."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

from tests.support.cli_runs import ckpt
from tests.support.measured import memory_of


def test_one_command_makes_a_run(tmp_path: Path, run_dir: Path) -> None:
    """What was taken, as what, and what was not and why is listed; `verify` finds the run good."""
    model = nn.Linear(2, 3)
    torch.save({"model": model.state_dict(), "epoch": 3, "odd": torch.ones(1, device="meta")}, tmp_path / "a.pt")
    answer = ckpt("import", tmp_path / "a.pt", run_dir, "--step", "5")
    assert answer.status == 0, answer.err
    assert "run step 5" in answer.out
    assert re.search(r"model +model +module +2 +36 B", answer.out)
    assert "odd: a tensor on the meta device" in answer.out
    assert "Imported 2 groups of the torch.save file a.pt" in answer.out
    assert ckpt("verify", run_dir).status == 0
    assert "imported_from" in ckpt("show", f"{run_dir}@5", "--json").out


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A file of any size takes less than 48 MiB of memory of its own: its tensors are views of the mapped file."""
    torch.save({"w": torch.ones(1)}, tmp_path / "small.pt")
    torch.save({f"w{n}": torch.ones(8 << 18) for n in range(12)}, tmp_path / "large.pt")
    small, large = ([tmp_path / f"{name}.pt", tmp_path / name] for name in ("small", "large"))
    assert memory_of(["import", *small], ["import", *large])[1] < 48
    assert (tmp_path / "large").stat()
