"""`ckpt import`: one command from a file of others to a run, and one line when it cannot be done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
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


def test_the_page_shows_what_is_printed(tmp_path: Path) -> None:
    """The import on docs/FILES.md says what the command says of such a file, but for numbers, sizes and widths."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    (tmp_path / "old").mkdir()
    saved: dict[str, object] = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    saved |= {"scheduler": scheduler.state_dict(), "epoch": 3, "step": 1200}
    torch.save(saved, tmp_path / "old/checkpoint.pt")
    page = (Path(__file__).parents[2] / "docs/FILES.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^\$ ckpt import old/checkpoint.pt runs/lm\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    said = ckpt("import", tmp_path / "old/checkpoint.pt", tmp_path / "runs/lm").out

    def plain(text: str) -> list[str]:
        text = re.sub(r"─+", "─", re.sub(r"\S+/runs/lm", "runs/lm", text))
        lines = [" ".join(re.sub(r"\d[\d.,]*( [KMG]?i?B)?", "#", line).split()) for line in text.splitlines()]
        return [line for line in lines if line]

    assert plain(said) == plain(shown)


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    """A file of any size takes less than 48 MiB of memory of its own: its tensors are views of the mapped file."""
    torch.save({"w": torch.ones(1)}, tmp_path / "small.pt")
    torch.save({f"w{n}": torch.ones(8 << 18) for n in range(12)}, tmp_path / "large.pt")
    small, large = ([tmp_path / f"{name}.pt", tmp_path / name] for name in ("small", "large"))
    assert memory_of(["import", *small], ["import", *large])[1] < 48
    assert (tmp_path / "large").stat()
