"""The plan of an import: what a file would become, and why the rest is left; nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tasks.checkpoint.transfer.importing.plan import plan_import
from ckpt_tasks.errors import ConfigError, IntegrityError
from tests.checkpoint.transfer.importing.test_importing import net, stepped


def test_what_would_be_a_guess_is_left(tmp_path: Path) -> None:
    """Numbers without names, in two groups or without a model, and moments of other shapes, are left."""
    model = net()
    two = torch.optim.SGD([{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()]}], momentum=0.9)
    saved = stepped(model, two)
    backwards = torch.optim.SGD([*model.parameters()][::-1], momentum=0.9)
    cases = {
        "2 groups": saved,
        "no model": {"optimizer": saved["optimizer"], "epoch": 1},
        "2 models": {"gen": model.state_dict(), "disc": model.state_dict(), "optimizer": saved["optimizer"]},
        "do not follow": stepped(model, backwards),
    }
    for why, values in cases.items():
        torch.save(values, tmp_path / "a.pt")
        plan = plan_import(tmp_path / "a.pt")
        assert why in plan.left["optimizer"]
        assert "optimizer" not in plan.groups
    torch.save(saved, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="optimizer: its parameters have numbers, and no model"):
        plan_import(tmp_path / "a.pt", groups=["optimizer"])


def test_the_step_of_a_file(tmp_path: Path) -> None:
    """A whole number, also as a float or as a tensor of one number, is the step; another value is not."""
    sevens: list[Any] = [7, 7.0, torch.tensor(7), torch.tensor(7.0)]
    others: list[Any] = [7.5, "7", True, torch.ones(3), torch.tensor(7, device="meta")]
    for value in (*sevens, *others):
        torch.save({"model": net().state_dict(), "step": value}, tmp_path / "a.pt")
        assert plan_import(tmp_path / "a.pt").step == (7 if any(value is one for one in sevens) else 0)


def test_shards_without_their_index(tmp_path: Path) -> None:
    """A directory of shards whose index is missing is refused: one shard of them would be a part of a model."""
    for n, (name, tensor) in enumerate(net().state_dict().items(), start=1):
        save_file({name: tensor}, tmp_path / f"model-{n:05}-of-00009.safetensors")
    with pytest.raises(IntegrityError, match=r"beside them: model\.safetensors\.index\.json"):
        plan_import(tmp_path)
